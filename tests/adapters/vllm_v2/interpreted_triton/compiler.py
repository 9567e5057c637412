"""The compiler that Triton looks for beside a driver; it is never asked for anything."""

from __future__ import annotations

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    """Supports the interpreted target and nothing else."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        raise NotImplementedError("nothing is compiled")

    def add_stages(self, stages, options, language):
        raise NotImplementedError("nothing is compiled")

    def load_dialects(self, context):
        raise NotImplementedError("nothing is compiled")

    def get_module_map(self):
        raise NotImplementedError("nothing is compiled")
