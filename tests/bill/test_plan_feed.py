"""What an image costs its host. Ratios of CPU time are compared where one is many times another."""

from __future__ import annotations

import pytest

from bill.plan_feed import JPEG, PIXELS, REFERENCES, find_cpu_ms, measure_cpu_ms
from utils.config.load import RunConfig, load_config
from utils.hosts import CPU_MS, HOSTS, count_vcpus

RECIPE = "configs/imagenet/resnet50.yaml"
DEAR = "resize(1200)|resize(224)"


def create(train_pp: str, *flags: str) -> RunConfig:
    config = load_config(["--config", RECIPE, *flags])
    data = config.data.model_copy(update={"train_pp": train_pp})
    return config.model_copy(update={"data": data})


@pytest.mark.parametrize("form", [JPEG, PIXELS])
def test_the_own_string_scales_the_cost_of_crop_and_flip(form):
    reference = REFERENCES[form]
    cpu_ms, origin = measure_cpu_ms(create(f"{reference}|{DEAR}|value_range(-1, 1)"))
    assert cpu_ms > 2 * CPU_MS[form]
    assert origin.startswith(f"{form}, ") and "times crop and flip" in origin


def test_the_value_range_runs_on_the_device_and_costs_the_host_nothing():
    plain, ranged = (
        measure_cpu_ms(create(REFERENCES[PIXELS] + more))[0] for more in ("", "|vgg_value_range")
    )
    assert plain < 3 * ranged and ranged < 3 * plain


def test_a_mixture_costs_the_mean_of_its_strings_by_weight():
    members = [{"weight": 3.0, "pp": REFERENCES[JPEG]}, {"weight": 1.0, "pp": ""}]
    config = create(f"{REFERENCES[JPEG]}|{DEAR}")
    dear, _ = measure_cpu_ms(config)
    mix = type(config.data).model_fields["mix"].annotation.__args__[0]
    data = config.data.model_copy(update={"mix": tuple(mix(**member) for member in members)})
    mixed, _ = measure_cpu_ms(config.model_copy(update={"data": data}))
    assert CPU_MS[JPEG] < mixed < dear


def test_a_string_that_cannot_run_here_is_said():
    cpu_ms, origin = measure_cpu_ms(create(f"{REFERENCES[JPEG]}|resize(32, inkey='other')"))
    assert cpu_ms == CPU_MS[JPEG] and "the own string fails here" in origin


@pytest.mark.parametrize(
    ("train_pp", "form"),
    [
        ("decode|resize(224)|value_range(-1, 1)", JPEG),
        ("random_resized_crop(224)|flip_lr|vgg_value_range", JPEG),
        ("inception_crop(224)|flip_lr|vgg_value_range", PIXELS),
    ],
)
def test_the_form_is_what_the_string_takes(train_pp, form):
    assert find_cpu_ms(create(train_pp)) == (CPU_MS[form], form)


def test_what_is_no_image_from_a_file_has_no_cost():
    config = create("value_range(-1, 1)")
    data = config.data.model_copy(update={"source": "synthetic"})
    assert measure_cpu_ms(config.model_copy(update={"data": data}))[0] is None


def test_every_generation_that_is_launched_has_hosts():
    assert count_vcpus("tpu7x", 4) == HOSTS["tpu7x-8"].vcpus == 224
    assert count_vcpus("tpu7x", 64) == 16 * 224
    assert count_vcpus("tpu7x", 2) is None and count_vcpus("v9", 4) is None
