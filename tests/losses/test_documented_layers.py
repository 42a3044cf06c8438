"""Every loss that the documents name, on the layers that they name, through the loop and XLA.

All terms of one pair of models stand in one weighted loss: one start and one graph serve them all.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from pathlib import Path

import pytest

from engine import run_steps
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.table import LOSSES
from tests.support.tiny_parts import create_argv, create_cpu_runtime, create_xla_runtime
from tests.test_teachers import export, get_flags
from utils.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
MAPS, BLOCK, POOLED = "patch_embed.proj", "blocks.0", "fc_norm"
RELATIONS = ("rkd", "rkd_unit", "sp", "pkt", "cckd", "cckd_paper", "cc_delta", "crd")
RELATIONS += ("pad", "srd", "itrd", "queue_kl")
ENSEMBLES = ("multi_avg_prob", "multi_avg_loss", "multi_avg_logit", "multi_sum", "multi_sum_bv")
TOKEN = ("deit_soft", "deit_hard")
# Stored answers, a second view, or a student that is built for it: other tests train with them.
ELSEWHERE = ("tinyvit_sparse", "crld", "mlkd", "mlkd_total", "norm", "simkd", "sskd")
ARGUMENTS = {
    "crd": {"num_examples": 96, "negatives": 8, "embed_dim": 8},
    "ctkd": {"curriculum_steps": 4},
    "ft": {"paraphrase_steps": 1},
    "lskd": {"loss": "dkd"},
    "cat_kd": {"student_head": "fc", "teacher_head": "fc"},
    "cc_delta": {"embed_dim": 8},
    "queue_kl": {"size": 24},
    "nd": {"num_classes": 10},
    "reviewkd": {"width": 4},
    "scalekd": {"heads": 4},
    "sdd": {"student_head": "fc", "teacher_head": "fc", "scales": [1]},
    "srrl": {"teacher_head": "head"},
    "wkd_l": {"teacher_head": "head"},
}
# student layer: teacher layer, as the table of docs/distillation.md has them.
LAYERS = {
    "vit": {
        "fitnet": [{BLOCK: BLOCK}, {POOLED: POOLED}],
        "hcl": [{MAPS: MAPS}],
        "at": [{BLOCK: BLOCK}, {MAPS: MAPS}],
        "at_paper": [{BLOCK: BLOCK}, {MAPS: MAPS}],
        **{name: [{POOLED: POOLED}] for name in RELATIONS},
        "sp": [{POOLED: POOLED}, {BLOCK: BLOCK}],
        **{name: [{BLOCK: BLOCK}] for name in ("nst", "cwd", "ickd", "vid", "wkd_f")},
        **{name: [{BLOCK: BLOCK}] for name in ("gram_mse", "gram_kl")},
        "ab": [{MAPS: MAPS}],
        "dist_plus": [{BLOCK: BLOCK}, {MAPS: MAPS}],
        "mgd": [{MAPS: MAPS}],
        "nd": [{POOLED: POOLED}],
        "vitkd": [{"norm_pre": "norm_pre", BLOCK: BLOCK}],
        "srrl": [{POOLED: POOLED}],
        "cckd": [{POOLED: POOLED}, {"blocks.0.attn.q_norm": "blocks.0.attn.k_norm"}],
    },
    "convnet": {
        "fitnet": [{"layer1": "layer1"}, {"layer1": "layer2"}, {"global_pool": "global_pool"}],
        "hcl": [{"layer2": "layer2"}],
        "at": [{"layer1": "layer2"}],
        "cat_kd": [{"layer4": "layer4"}],
        "reviewkd": [{"layer1": "layer1", "layer2": "layer2", "layer3": "layer3"}],
        "ft": [{"layer1": "layer1"}],
        "scalekd": [{"layer1": "layer1"}],
        "sdd": [{"layer4": "layer4"}],
        "semckd": [{"layer1": "layer1", "layer2": "layer2"}],
        "ofd": [{"layer4.0.bn2": "layer4.0.bn2"}],
        "fsp": [{"layer3": "layer3", "layer4": "layer4"}],
        "rkd": [{"layer2": "layer2"}, {"global_pool": "global_pool"}],
        "pkt": [{"global_pool": "global_pool"}],
    },
}
CONVNET = (
    "--model=resnet18",
    '--model.args={"in_chans": 1, "channels": [4, 4, 8, 8], "layers": [1, 1, 1, 1]}',
)


def list_documented() -> list[str]:
    """Names in the first column of the tables of docs/losses.md that are losses."""
    text = (ROOT / "docs/losses.md").read_text(encoding="utf-8")
    tables = text[text.index("## Losses on logits") : text.index("## Where references differ")]
    cells = re.findall(r"^\| (`[^|]*) \|", tables, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def list_terms(kind: str) -> list[dict]:
    """The terms of one pair of models: what its layers feed; logits with the first."""
    if kind == "token":
        return [{"name": name} for name in TOKEN]
    featured = [
        {"name": name, "layers": layers, "args": ARGUMENTS.get(name, {})}
        for name, choices in LAYERS[kind].items()
        for layers in choices
    ]
    if kind != "vit":
        return featured
    taken = {*LAYERS["vit"], *LAYERS["convnet"], *TOKEN, *ELSEWHERE}
    others = [name for name in list_documented() if name not in taken]
    return [*featured, *map(create_term, others)]


def create_term(name: str) -> dict:
    """A loss that no list names: on a block where it compares activations."""
    has_layers = "layers" in inspect.signature(LOSSES.get(name)).parameters
    layers = {"layers": {BLOCK: BLOCK}} if has_layers else {}
    return {"name": name, "args": ARGUMENTS.get(name, {})} | layers


def take_steps(folder: Path, kind: str, teachers: list[Path], runtime) -> list[dict[str, float]]:
    """Values of all terms over two steps."""
    sections = [{"weights": str(path)} for path in teachers]
    flags = create_argv(
        folder, *get_flags(sections, list_terms(kind), group_size=8), device=runtime.name
    )
    if kind == "convnet":
        flags = [flag for flag in flags if not flag.startswith("--model")] + list(CONVNET)
    if kind == "token":
        flags += ["--model=deit_tiny_distilled_patch16_224"]
    parts = build_parts(runtime, check(load_config(flags)))
    batches = itertools.islice(iterate_batches(parts, 0), 2)
    found = []
    for result in run_steps(parts.state, batches, parts.task, runtime, parts.plan):
        values = runtime.fetch(result.values).tolist()
        found.append(dict(zip(result.names, values, strict=False)))
    parts.close()
    return found


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("teachers")
    vit = export(root / "vit", 1)
    arguments = {"in_chans": 1, "channels": [8, 8, 8, 8], "layers": [1, 1, 1, 1]}
    convnet = export(root / "convnet", 2, model="resnet18", args=arguments)
    return {"vit": [vit], "token": [vit], "convnet": [convnet]}


def test_every_loss_is_documented_and_tested():
    documented = set(list_documented())
    tried = {term["name"] for kind in (*LAYERS, "token") for term in list_terms(kind)}
    assert documented == tried | set(ELSEWHERE)
    assert set(ENSEMBLES) <= tried
    assert documented == set(LOSSES)


@pytest.mark.xla
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "token" else pytest.mark.slow)
        for kind in (*LAYERS, "token")
    ],
)
def test_documented_losses_train_on_xla_as_on_the_cpu(kind, teachers, tmp_path):
    usual, xla = (
        take_steps(tmp_path, kind, teachers[kind], runtime)
        for runtime in (create_cpu_runtime(), create_xla_runtime())
    )
    for here, there in zip(usual, xla, strict=True):
        assert here.keys() == there.keys()
        assert all(math.isfinite(value) for value in there.values()), there
    for name, value in usual[0].items():
        assert xla[0][name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
