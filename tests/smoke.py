"""Uses packages that were installed from wheels: ``python -I smoke.py PACKAGE ...``.

Runs in an environment that has the packages and their dependencies and nothing else. ``-I`` keeps
the repository's source off the module path.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType

OF_EXTRAS = {"google": "protobuf", "grpc": "grpcio"}
"""The distributions of modules with other names."""


HOSTS = {"habana_frameworks", "ray", "sglang", "vllm", "vllm_gaudi"}
"""Runtimes that import a module for them: no extra installs one."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--without", metavar="MODULE", help="which must not be installed")
    options = parser.parse_args()
    if options.without:
        assert find_spec(options.without) is None, f"{options.without} is installed"
    for package in options.packages:
        check(package)
    print(f"{', '.join(options.packages)}: installed, imported and used")


def check(package: str) -> None:
    """Checks what the wheel has to contain, then calls the package."""
    installed = distribution(f"trencadis-{package}")
    module = import_module(f"trencadis.{package}")
    source = Path(str(module.__file__)).parent
    assert source.is_relative_to(sys.prefix), f"{source} is not the installed package"
    assert module.__version__ == installed.version
    assert (source / "py.typed").is_file(), f"{package} has no py.typed"
    assert (installed.read_text("licenses/LICENSE") or "").lstrip().startswith("Apache License")
    for name in module.__all__:
        getattr(module, name)
    import_modules(module, installed)
    check_commands(installed)
    CALLS.get(package, lambda: None)()


def import_modules(package: ModuleType, installed: Distribution) -> None:
    """Imports every module. One that cannot be imported lacks what an extra installs."""
    of_extras = {
        re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_")
        for requirement in installed.requires or ()
        if "extra ==" in requirement
    }
    for info in walk_packages(package.__path__, f"{package.__name__}."):
        try:
            import_module(info.name)
        except ImportError as error:  # noqa: PERF203
            cause = error.__cause__ or error
            missing = (getattr(cause, "name", None) or "").partition(".")[0]
            declared = OF_EXTRAS.get(missing, missing) in of_extras | HOSTS
            assert declared, f"{info.name} needs {missing or error}, which is not declared"


def check_commands(installed: Distribution) -> None:
    """Runs each command of the package with ``--version``."""
    for point in installed.entry_points.select(group="console_scripts"):
        command = Path(sys.executable).with_name(point.name)
        run = [sys.executable, "-I", str(command), "--version"]
        printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        assert printed == f"{point.name} {installed.version}\n", printed


def use_bucketing() -> None:
    from trencadis.bucketing import BucketGrid

    bucket = BucketGrid({"batch": (1, 2, 4), "seq": (128, 256)}).find((3, 200))
    assert bucket is not None
    assert bucket.shape == (4, 256)


def use_kvcache() -> None:
    from trencadis.kvcache import BlockManager, CacheConfig

    manager = BlockManager(CacheConfig(num_blocks=8, block_size=4))
    manager.allocate(1, [1, 2, 3, 4, 5])
    assert manager.block_table(1).tolist() == [1, 2]


def use_warmup() -> None:
    from trencadis.bucketing import BucketGrid
    from trencadis.warmup import warm_up

    class Runtime:
        def execute(self, phase: object, bucket: object) -> None: ...

        def synchronize(self) -> None: ...

        def free_memory(self) -> int:
            return 1 << 30

    grid = BucketGrid({"batch": (1, 2), "seq": (128,)})
    assert len(warm_up(Runtime(), grid.buckets, grid.buckets).executed) == 4


def use_scheduler() -> None:
    from trencadis.kvcache import BlockManager, CacheConfig
    from trencadis.scheduler import Request, Scheduler, SchedulerConfig

    scheduler = Scheduler(SchedulerConfig(), BlockManager(CacheConfig(num_blocks=8, block_size=4)))
    sequence = scheduler.add(Request(request_id="a", prompt_token_ids=(1, 2, 3), max_tokens=2))
    while scheduler.has_work:
        output = scheduler.schedule()
        rows = (*output.prompts, *output.decodes)
        scheduler.update(output, {seq_id: 7 for row in rows for seq_id in row.sample_ids})
    assert list(sequence.output_token_ids) == [7, 7]


def use_server() -> None:
    from importlib.resources import files

    for name in ("page.html", "page.css", "page.js"):
        assert (files("trencadis.server.dashboard") / name).is_file(), f"the wheel lacks {name}"


CALLS = {
    "bucketing": use_bucketing,
    "kvcache": use_kvcache,
    "warmup": use_warmup,
    "scheduler": use_scheduler,
    "server": use_server,
}

if __name__ == "__main__":
    main()
