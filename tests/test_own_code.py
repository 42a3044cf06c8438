"""What docs/own_code.md says, run from a package in a directory of its own."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from models.trained import open_trained
from service.jobs.files import open_queue
from service.jobs.submission import Submission
from store.query.schemas import MODELS
from store.record.history import read_metrics
from tests.support.child_runs import ROOT, get_command, get_environment, run_main
from tests.support.tiny_parts import SYNTHETIC
from utils.errors import EXIT_USER_ERROR, UserError

PAGE = ROOT / "docs" / "own_code.md"
_BLOCK = re.compile(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)
NAMES = ("models", "losses", "sources", "tasks", "extras")
TWO = ("--runtime.device=cpu", "--runtime.num_processes=2", "--runtime.num_threads=1")
OWN = ("--run.tensorboard=false", "--train.log_every_steps=1", "--train.checkpoint_every_steps=10")
# An op that writes one number, and a model that notes what it gets.
PROBE = """
from pathlib import Path
from timm.models import register_model
from torch import nn
from big_vision.pp.registry import OPS, on_key

@OPS.register("my_constant")
@on_key
def get_constant(value: int):
    return lambda image: 0 * image + value

class Probe(nn.Module):
    def __init__(self, num_classes: int, seen: str):
        super().__init__()
        self.head, self.seen = nn.Linear(1, num_classes), seen
    def get_classifier(self):
        return self.head
    def forward(self, x):
        if x.device.type == "cpu":
            with Path(self.seen).open("a") as file:
                file.write(f"{self.training} {[round(v, 4) for v in x.unique().tolist()]}\\n")
        return self.head(x.mean((1, 2, 3)).unsqueeze(1))

@register_model
def my_probe(pretrained, pretrained_cfg, pretrained_cfg_overlay, cache_dir=None, **kwargs):
    return Probe(**kwargs)
"""
# Several calls of a program in one process; prints their exit codes.
_CALLS = "import sys, json; from tools.export.__main__ import main; "
_CALLS += "print([main(words) for words in json.loads(sys.argv[1])])"


def write_package(folder: Path) -> Path:
    """The files of the page; returns its configuration."""
    files = dict(_BLOCK.findall(PAGE.read_text()))
    assert set(files) == {"waves.yaml", *(f"my_pkg/{name}.py" for name in (*NAMES, "checks"))}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "my_pkg" / "__init__.py").write_text('__version__ = "1.5"\n')
    return folder / "waves.yaml"


def get_flags(config: Path, runs: Path, *flags: str) -> list[str]:
    own = (f"--run.output_dir={runs}", "--run.run_id=a", "--train.steps=50")
    return ["--config", str(config), *own, *TWO, *OWN, *flags]


def refuse(*flags: str, text: str) -> str:
    """The one line of a refusal, which holds the text."""
    done = run_main(flags)
    lines = done.stderr.splitlines()
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert [line.startswith("error: ") for line in lines].index(True) == len(lines) - 1, lines
    assert text in lines[-1] and "Traceback" not in done.stderr, done.stderr
    return lines[-1]


def read_losses(run: Path) -> list[tuple[int, float]]:
    lines = read_metrics(run)
    return [(line["step"], line["loss/total"]) for line in lines if line["kind"] == "train"]


def kill_and_continue(flags: list[str], run: Path, whole: Path, steps: int) -> None:
    """Kill a run after its first checkpoint, continue it, and compare all with the whole one."""
    child = subprocess.Popen(
        get_command(flags), cwd=ROOT, env=get_environment(), stderr=subprocess.DEVNULL
    )
    while child.poll() is None and not list((run / "checkpoints").glob("step_*/COMMITTED")):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert len(read_losses(run)) < steps
    again = run_main([*flags, "--resume=auto"])
    assert again.returncode == 0 and "resumed from" in again.stderr, again.stderr[-3000:]
    assert read_losses(run) == read_losses(whole)
    mine, theirs = (load_file(folder / "student.safetensors") for folder in (run, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def call_export(*calls: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """`tools.export` with each list of words, in a new process."""
    return subprocess.run(
        [sys.executable, "-c", _CALLS, json.dumps(calls)],
        cwd=ROOT,
        env={**get_environment(), **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return write_package(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def whole(own) -> Path:
    """A finished run of two processes."""
    done = run_main(get_flags(own, own.parent / "whole"))
    assert done.returncode == 0, done.stderr[-3000:]
    return own.parent / "whole" / "waves" / "a"


def test_each_block_of_the_page_is_short():
    for name, text in _BLOCK.findall(PAGE.read_text()):
        assert len(text.splitlines()) <= 31, name


@pytest.mark.slow
def test_two_processes_train_own_parts(whole):
    facts = json.loads((whole / "run.json").read_text())
    assert facts["status"] == "complete" and facts["environment"]["world_size"] == 2
    assert facts["final"]["eval_my_error"] < 0.35
    lrs = [line["lr"] for line in read_metrics(whole) if line["kind"] == "train"]
    assert lrs[0] == pytest.approx(0.1) and lrs[3] == pytest.approx(0.05)


def test_the_environment_names_file_hash_and_version(own, whole):
    environment = json.loads((whole / "environment.json").read_text())
    MODELS["environment"].model_validate(environment)
    modules = environment["imports"]
    assert set(modules) == {f"my_pkg.{name}" for name in NAMES}
    assert modules["my_pkg.models"]["file"] == str(own.parent / "my_pkg" / "models.py")
    assert modules["my_pkg.models"]["version"] == "1.5"
    assert len({module["sha256"] for module in modules.values()}) == 1


def test_a_killed_run_continues_bit_for_bit(own, whole):
    runs = own.parent / "killed"
    kill_and_continue(get_flags(own, runs), runs / "waves" / "a", whole, 50)


def test_the_export_is_of_the_own_model(own, whole):
    facts = json.loads((whole / "student.json").read_text())
    assert facts["model"] == "my_net" and facts["args"] == {"in_features": 2}
    code = (
        "import sys, timm; from safetensors.torch import load_file; import my_pkg.models; "
        "model = timm.create_model('my_net', num_classes=1, in_features=2); "
        "model.load_state_dict(load_file(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(whole / "student.safetensors")],
        cwd=own.parent,
        check=True,
    )


def test_other_code_is_not_resumed(own, whole, tmp_path):
    config = write_package(tmp_path)
    with (tmp_path / "my_pkg" / "losses.py").open("a") as file:
        file.write("# changed\n")
    flags = ("--config", str(config), *TWO, *OWN, f"--resume={whole / 'checkpoints'}")
    flags = (*flags, "--train.steps=60")
    line = refuse(*flags, "--run.allow_changes=[train.steps]", text="run.imports")
    assert "the code of my_pkg.extras was" in line and "allow_changes" in line
    allowed = "--run.allow_changes=[train.steps, run.imports]"
    done = run_main([*flags, allowed, "--check"])
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def images(own, tmp_path_factory) -> tuple[Path, list[str]]:
    """A student of images by an own loss, model and teacher; and the flags that made it."""
    runs = tmp_path_factory.mktemp("images")
    flags = [flag for flag in SYNTHETIC if not flag.startswith("--model")]
    flags += ["--model=my_net", "--model.args={in_features: 64}", "--runtime.device=cpu", *OWN]
    flags += ["--runtime.num_threads=1"]
    flags += ["--run.imports=[my_pkg.models, my_pkg.losses]", f"--run.import_dir={own.parent}"]
    flags += ["--optim.name=sgd", "--train.eval_every_epochs=5"]
    output = f"--run.output_dir={runs}"
    teacher = run_main([*flags, output, "--run.run_id=t", "--train.steps=3"])
    assert teacher.returncode == 0, teacher.stderr[-3000:]
    flags += [f"--teacher_path={runs}/tiny/t", "--distill.allow_weak_teacher", "--kd=my_gap"]
    flags += ["--train.steps=60"]
    done = run_main([*flags, output, "--run.run_id=s"])
    assert done.returncode == 0, done.stderr[-3000:]
    return runs / "tiny" / "s", flags


@pytest.mark.slow
def test_images_distil_by_an_own_loss_model_and_teacher(images, tmp_path):
    student, flags = images
    assert read_metrics(student)[0]["loss/my_gap"] > 0
    flags = [*flags, f"--run.output_dir={tmp_path}", "--run.run_id=k"]
    kill_and_continue(flags, tmp_path / "tiny" / "k", student, 60)


@pytest.mark.slow
def test_an_export_finds_its_code_in_its_run_or_in_the_path_of_python(own, images, tmp_path):
    student, moved = images[0], tmp_path / "moved"
    moved.mkdir()
    for name in ("student.safetensors", "student.json"):
        shutil.copy(student / name, moved)
    more = ["--pp", "decode(1)|resize(8)|value_range(-1, 1)", "--out"]
    inside, timm = ([str(student), "--to", form, *more] for form in ("torch_export", "timm"))
    done = call_export([*inside, str(tmp_path / "in")], [*timm, str(tmp_path / "timm")])
    assert done.stdout.splitlines()[-1] == "[0, 2]", done.stderr[-3000:]
    assert (tmp_path / "in" / "torch_export").is_dir() and not (tmp_path / "timm").exists()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: --to timm: my_net has no pretrained_cfg"), last
    with pytest.raises(UserError) as refused:
        open_trained(str(moved), "WEIGHTS")
    words = f"WEIGHTS ('{moved}'): run.imports ('my_pkg.models'): there is no module my_pkg; put"
    assert str(refused.value).startswith(words) and "PYTHONPATH" in str(refused.value)
    away = [str(moved), *inside[1:], str(tmp_path / "out")]
    done = call_export(away, PYTHONPATH=str(own.parent))
    assert done.stdout.splitlines()[-1] == "[0]", done.stderr[-3000:]


@pytest.mark.slow
def test_a_sweep_and_a_queue_run_own_code(own, tmp_path):
    """A metric of its own, too; each trial is forked from a program without that code."""
    store = tmp_path / "runs"
    quick = {"train.epochs": 1, "runtime.device": "cpu", "runtime.num_threads": 1}
    spec = {"config": str(own), "set": quick, "axes": {"model.args.width": [4, 8]}}
    (tmp_path / "widths.yaml").write_text(
        yaml.safe_dump({**spec, "metric": "eval.my_error", "direction": "lower"})
    )
    environment = {**get_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def call(*words: str) -> str:
        command = [sys.executable, "-m", *words, f"--store={store}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        logs = [path.read_text()[-2000:] for path in store.glob("jobs/*/log.txt")]
        assert done.returncode == 0, (done.stderr[-3000:], logs)
        return done.stdout

    shown = call("tools.sweep", "run", str(tmp_path / "widths.yaml"), "--slots=2", "--json")
    sweep = json.loads(shown)
    assert [trial["state"] for trial in sweep["trials"]] == ["complete"] * 2
    errors = [row["interval"]["mean"] for row in sweep["table"]["points"]]
    assert errors == sorted(errors) and len(set(errors)) == 2
    overrides = {**quick, "run.run_id": "queued"}
    open_queue(str(store)).submit(Submission(config=str(own), overrides=overrides), "me")
    call("tools.queue", "run", "--until-empty")
    runs = list((store / "waves").iterdir())
    assert len(runs) == 3 and store / "waves" / "queued" in runs
    for run in runs:
        assert json.loads((run / "run.json").read_text())["status"] == "complete"
        imports = json.loads((run / "environment.json").read_text())["imports"]
        assert set(imports) == {f"my_pkg.{name}" for name in NAMES}
    assert "my_pkg" not in sys.modules


BAD = {
    "a missing module": ("[losing.nothing]", "there is no module losing.nothing; put it beside"),
    "a missing package": ("[nothing_here]", "there is no module nothing_here; put it beside"),
    "no name": ("[my-pkg]", "run.imports ('my-pkg') is no module; write"),
    "a word": ("7", "run.imports"),
    "a number in a list": ("[7]", "run.imports"),
    "a broken module": ("[broken]", "ZeroDivisionError: division by zero ("),
    "a syntax error": ("[odd]", "SyntaxError"),
    "a module that exits": ("[leaves]", "SystemExit: 3"),
    "a missing dependency": ("[needy]", "No module named 'not_installed_anywhere'"),
    "a name that is taken": ("[twice]", "loss 'kd' is registered twice"),
    "a shadowed name": ("[models]", "comes before it; rename your own"),
    "a shadowed package": ("[losses.own]", "comes before it; rename your own"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_module_is_one_line(case, tmp_path):
    modules = {
        "broken": "1 / 0",
        "odd": "def (",
        "leaves": "raise SystemExit(3)",
        "needy": "import not_installed_anywhere",
        "twice": "from losses.table import LOSSES\nLOSSES.register('kd')(print)",
        "models": "",
        "losses/own": "",
        "losing/thing": "",
    }
    for name, text in modules.items():
        path = tmp_path / "x" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    names, text = BAD[case]
    config = tmp_path / "x" / "run.yaml"
    config.write_text(f"run: {{imports: {names}, output_dir: {tmp_path / 'runs'}}}\n")
    refuse("--config", str(config), text=text)
    assert not (tmp_path / "runs").exists()


def test_a_file_extends_one_of_the_project(own, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("extends: configs/smoke.yaml\nrun: {imports: [thing], import_dir: sub}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "thing.py").write_text("")
    done = run_main(["--config", str(config), "--print-config"])
    assert done.returncode == 0, done.stderr
    assert re.search(rf"import_dir: {tmp_path}/sub +# {config}", done.stdout)


def test_an_entry_point_names_a_module(tmp_path):
    facts = tmp_path / "plug-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[trainer.imports]\nmy-plugin = plug_code.inner\n")
    (tmp_path / "plug_code").mkdir()
    (tmp_path / "plug_code" / "inner.py").write_text("print('plugged in')\n")
    done = subprocess.run(
        get_command(["--run.imports=[my-plugin]", "--model=mnist_cnn", "--print-config"]),
        cwd=ROOT,
        env={**get_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("plugged in"), done.stderr


def test_the_model_sees_what_an_own_op_writes(tmp_path):
    from PIL import Image

    for split in ("train", "validation"):
        for name in ("a", "b"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("L", (8, 8), 10 * number).save(folder / f"{number}.png")
    (tmp_path / "my_probe.py").write_text(PROBE)
    pp, seen = "decode(1)|{}|resize(8)|value_range(0, 1)", tmp_path / "seen"
    flags = [f"--data.train_pp={pp.format('my_constant(51)')}", "--data.source=folder"]
    flags += [f"--data.eval_pp={pp.format('my_constant(51)|my_constant(value=102)')}"]
    flags += [f"--data.root={tmp_path / 'data'}", "--data.global_batch_size=4", *TWO, *OWN]
    flags += ["--model=my_probe", f"--model.args={{seen: {seen}}}", "--train.steps=2"]
    flags += ["--run.imports=[my_probe]", f"--run.import_dir={tmp_path}"]
    done = run_main([*flags, f"--run.output_dir={tmp_path / 'runs'}"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(seen.read_text().splitlines()) == {"True [0.2]", "False [0.4]"}


def test_a_service_refuses_own_code_unless_allowed(own, tmp_path, monkeypatch):
    from service.web.app import create_app
    from service.web.settings import ServiceSettings
    from tests.service.web.apps import make_client

    values = {"run.imports": ["my_pkg.models"], "model.name": "my_net", "run.run_id": "x"}
    values |= {"model.args": {"in_features": 150528}, "data.source": "synthetic", "data.name": ""}
    body = {"config": "configs/smoke.yaml", "overrides": values, "dry_run": True}
    app = create_app(ServiceSettings(str(tmp_path)))
    answer = make_client(app).post("/api/v1/submit", json=body)
    assert answer.status_code == 422 and "--allow-imports" in answer.json()["detail"]
    assert "my_pkg.models" not in sys.modules
    roots = (str(own.parent),)
    allowed = create_app(ServiceSettings(str(tmp_path), roots=roots, allow_imports=True))
    outside = {**body, "overrides": {**values, "run.import_dir": "/"}}
    answer = make_client(allowed).post("/api/v1/submit", json=outside)
    assert answer.status_code == 422 and "run.import_dir" in answer.json()["detail"]
    inside = {**body, "overrides": {**values, "run.import_dir": str(own.parent)}}
    answer = make_client(allowed).post("/api/v1/submit", json=inside)
    assert answer.status_code == 200, answer.text
    assert "my_net" in str(answer.json()) and "my_pkg.models" not in sys.modules
    missing = {**inside, "overrides": {**inside["overrides"], "run.imports": ["my_pkg.gone"]}}
    answer = make_client(allowed).post("/api/v1/submit", json=missing)
    assert "there is no module my_pkg.gone" in answer.json()["detail"]
    allowed.state.service.close()
