"""A retrieval service: what a corpus says after a text's ending, over HTTP, with a latency that stands for a network.

python service.py CORPUS --tokenizer TARGET --port 8008 --latency-ms 20
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from specdec_plugin_retrieval import CorpusIndex
from specdec_plugin_retrieval.index import SEPARATOR

DEPTH = 16
MIN_LENGTH = 2


def following(index: CorpusIndex, tokens: Sequence[int], k: int) -> list[int]:
    """At most k token ids that followed the longest ending of `tokens`, where it occurs first."""
    places = index.matches(tokens, MIN_LENGTH).places
    found = index.tokens[places[0] : places[0] + k].tolist() if len(places) else []
    return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


def serve(index: CorpusIndex, port: int, latency_ms: float) -> ThreadingHTTPServer:
    """A server of the loopback that is bound, and answers from `serve_forever` on. port: 0 is a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(latency_ms / 1000)
            answer = json.dumps({"token_ids": following(index, question["token_ids"], question["k"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing: there is one for every question."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="a folder of texts")
    parser.add_argument("--tokenizer", required=True, help="the target's directory")
    parser.add_argument("--port", type=int, default=8008)
    parser.add_argument("--latency-ms", type=float, default=20)
    options = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in sorted(options.corpus.glob("**/*.txt"))]
    documents = AutoTokenizer.from_pretrained(options.tokenizer)(texts, add_special_tokens=False)["input_ids"]
    serve(CorpusIndex.build(documents, DEPTH), options.port, options.latency_ms).serve_forever()


if __name__ == "__main__":
    main()
