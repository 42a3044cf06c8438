"""The floor of a convolutional step's traffic: counted by hand, and of ResNet-50."""

from __future__ import annotations

from collections import Counter

from lab import traffic


def test_a_convolution_moves_what_each_operation_reads_and_writes():
    """Input 3, output 5: 3 + 5, then 5, then 3 + 5 + 5, then 5 + 5 + 3."""
    found = traffic.list_bytes(3, 5)
    assert found == {
        "forward": 8,
        "sums": 5,
        "weight_gradient": 13,
        "input_gradient": 13,
        "total": 39,
        "both_at_once": 29,
        "convolutions": 1,
    }
    first = traffic.list_bytes(0, 5, images=2)
    assert (first["input_gradient"], first["total"]) == (0, 7 + 5 + 12)
    assert first["both_at_once"] == first["total"]


def test_resnet_50_is_counted_by_stages(capsys):
    assert traffic.main(["--batch=2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:7]] == [
        ["conv1", "1"],
        ["layer1", "10"],
        ["layer2", "13"],
        ["layer3", "19"],
        ["layer4", "10"],
        ["all", "53"],
    ]
    rows = traffic.count_traffic("resnet50", 2)
    # 64 channels at 112 x 112 of two images, two bytes each.
    assert rows["conv1"]["sums"] == 2 * 2 * 64 * 112 * 112
    assert rows["conv1"]["input_gradient"] == 0
    whole = sum(rows.values(), Counter())
    assert whole["sums"] == 2 * 2 * 11_113_984
