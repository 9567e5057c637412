"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const root = document.documentElement;
  const el = (id) => document.getElementById(id);

  // Colours of the theme; everything else of a plot was decided when the page was written.
  const themed = (layout) => {
    const style = getComputedStyle(root), ink = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
    return { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { font: { family: "system-ui, sans-serif" } },
      xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis } };
  };
  const figures = read("data-figures");
  const draw = () => { for (const { name, figure } of figures) Plotly.react("plot-" + name, figure.data, themed(figure.layout), { displayModeBar: false, responsive: true }); };
  const setTheme = (theme) => { root.dataset.theme = theme; draw(); };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const asked = new URLSearchParams(location.search).get("theme");
  setTheme(asked || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  el("theme").onclick = () => setTheme(root.dataset.theme === "dark" ? "light" : "dark");

  el("copy").onclick = async () => {
    const lines = [...el("figures").rows].map((row) => [...row.cells].map((cell) => cell.textContent).join("\t"));
    const area = Object.assign(document.createElement("textarea"), { value: lines.join("\n") });
    document.body.append(area);
    area.select();
    document.execCommand("copy");  // a page that is opened as a file has no clipboard interface everywhere
    area.remove();
    el("copy").textContent = "copied";
  };

  if (el("tokens")) {
    const texts = read("data-texts"), runs = new Map();
    const requests = (run) => { if (!runs.has(run)) runs.set(run, read("data-run-" + run)); return runs.get(run); };
    const text = (id) => texts[id] ?? "<" + id + ">";
    const percent = (p) => p == null ? "unknown" : (100 * p).toPrecision(3) + " %";
    const span = (id, mark, lines) => {
      const node = document.createElement("span");
      node.className = mark;
      // A line break of a rejected token is shown, and breaks no line: the text has none there.
      node.textContent = (mark === "rejected" ? text(id).replace(/\r?\n/g, "↵").replace(/\t/g, "⇥") : text(id)) || "∅";
      node.dataset.tip = [JSON.stringify(text(id)) + "  id " + id, ...lines].join("\n");
      return node;
    };
    const missLines = (miss) => !miss ? [] : [
      "target: rank " + (miss.target_rank ?? "beyond what was kept") + ", probability " + percent(miss.target_probability),
      ...(miss.target_top || []).map(([id, p]) => "   " + percent(p).padEnd(8) + " " + JSON.stringify(text(id))),
      "proposer: probability " + percent(miss.draft_probability),
      ...(miss.second_choice == null ? [] : ["second choice: " + JSON.stringify(text(miss.second_choice)) + (miss.second_choice_right ? ", right" : ", wrong")])];
    const show = () => {
      const [, , output, drafts, accepted, misses, probabilities, parents] = requests(el("run").value)[el("prompt").value];
      const bySteps = new Map(misses.map((miss) => [miss.step, miss])), nodes = [];
      let place = 0;
      const likely = () => probabilities.length ? ["target: probability " + percent(probabilities[place])] : [];
      accepted.forEach((count, step) => {
        // In a tree (`above`) the accepted path stands first, and what was met at its end comes next.
        const drafted = drafts[step], above = parents[step], all = [...drafted.keys()];
        const at = (i) => "step " + (step + 1) + (above ? ", depth " + (Math.min(i, count) + 1) + " in a tree of " + drafted.length : ", draft position " + (i + 1) + " of " + drafted.length);
        const beside = (i) => !above ? [] : all.filter((j) => j >= count && above[j] === above[i]).map((j) => "beside it: " + JSON.stringify(text(drafted[j])));
        const behind = (i) => all.reduce((found, j) => found.has(above[j]) ? found.add(j) : found, new Set([i])).size - 1;
        const shown = all.filter((i) => i >= count && (!above || above[i] === count - 1));
        const why = (i) => above ? "rejected, with " + behind(i) + " behind it" : i === count ? "rejected" : "behind a rejected one";
        for (let i = 0; i < count && place < output.length; i++) { const lines = [at(i), "accepted", ...beside(i), ...likely()]; nodes.push(span(output[place++], "accepted", lines)); }
        for (const i of shown) nodes.push(span(drafted[i], "rejected", [at(i), why(i), ...(i === count ? missLines(bySteps.get(step)) : [])]));
        if (place >= output.length) return;
        const origin = !drafted.length ? "no draft" : shown.length ? "recovered: the target's own" : "bonus token";
        const lines = ["step " + (step + 1), origin, ...likely()];
        nodes.push(span(output[place++], drafted.length ? "sampled" : "", lines));
      });
      el("text").replaceChildren(...nodes);
    };
    const fill = () => {
      el("prompt").replaceChildren(...requests(el("run").value).map(([id, category], i) => new Option(id + " · " + category, i)));
      show();
    };
    el("run").onchange = () => { const kept = el("prompt").value; fill(); el("prompt").value = kept || 0; show(); };
    el("prompt").onchange = show;
    fill();
    const tip = el("tip");
    el("text").onmousemove = (event) => {
      tip.hidden = !event.target.dataset.tip;
      if (tip.hidden) return;
      tip.textContent = event.target.dataset.tip;
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = (event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : event.clientY + 18) + "px";
    };
    el("text").onmouseleave = () => { tip.hidden = true; };
  }
  root.dataset.ready = "yes";
  root.dataset.milliseconds = Math.round(performance.now());  // since the page was asked for
})();
