"""ResNets for 32 x 32 images of the usual distillation tables: resnet8x4, resnet32x4."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 128, 256)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut, which is projected where shapes change."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _create_conv(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _create_conv(channels, channels, 3, 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != channels:
            projection = _create_conv(in_channels, channels, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, features: Tensor) -> Tensor:
        """[B, channels, H / stride, W / stride], after the ReLU."""
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(features)))))
        return functional.relu(inner + self.shortcut(features))


class CifarResNet(nn.Module):
    """Three stages (`layer1` to `layer3`) of basic blocks at full, half and quarter resolution.

    Args:
      blocks: blocks of each stage; a depth of 6 n + 2 layers has n.
      num_classes: 0 leaves the classifier out.

    Source: He et al. 2016, arXiv:1512.03385, section 4.2, four times as wide, as in the tables of
    CRD, arXiv:1910.10699.
    """

    def __init__(self, blocks: int, num_classes: int = 100, in_chans: int = 3) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, WIDTHS[2]
        self.conv1 = _create_conv(in_chans, 32, 3, 1)
        self.bn1 = nn.BatchNorm2d(32)
        self.layer1 = _create_stage(32, WIDTHS[0], blocks, stride=1)
        self.layer2 = _create_stage(WIDTHS[0], WIDTHS[1], blocks, stride=2)
        self.layer3 = _create_stage(WIDTHS[1], WIDTHS[2], blocks, stride=2)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(WIDTHS[2], num_classes) if num_classes else nn.Identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """[B, 256, H / 4, W / 4], the last maps."""
        features = functional.relu(self.bn1(self.conv1(images)))
        return self.layer3(self.layer2(self.layer1(features)))

    def forward_head(self, maps: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits, or the vectors before the classifier, of the last maps."""
        vectors = self.pool(maps)
        return vectors if pre_logits else self.fc(vectors)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes]."""
        return self.forward_head(self.forward_features(images))


def create_resnet8x4(num_classes: int = 100, in_chans: int = 3) -> CifarResNet:
    """Create the usual student: 1.23 million parameters at 100 classes."""
    return CifarResNet(1, num_classes, in_chans)


def create_resnet32x4(num_classes: int = 100, in_chans: int = 3) -> CifarResNet:
    """Create the usual teacher: 7.43 million parameters at 100 classes."""
    return CifarResNet(5, num_classes, in_chans)


def _create_conv(in_channels: int, channels: int, kernel: int, stride: int) -> nn.Conv2d:
    """Create a convolution without bias that keeps the size, with He's initial values."""
    conv = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False)
    if not conv.weight.is_meta:
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _create_stage(in_channels: int, channels: int, blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))
