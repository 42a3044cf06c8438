"""A small convolutional network for small grey images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from utils.errors import UserError


class MnistCnn(nn.Module):
    """Two 5 x 5 convolutions, each with ReLU and max pooling, then two linear layers.

    With the default widths and ten classes there are 215,370 parameters.

    Args:
      img_size: side of the images, a multiple of 4.
      widths: channels of the two convolutions, and the hidden vector's length.
      drop_rate: of the hidden vector.

    Source: the shape of LeNet-5, LeCun et al. 1998, with today's parts.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: int = 28,
        widths: tuple[int, int, int] = (16, 32, 128),
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if img_size % 4 or img_size < 4:
            raise UserError(
                f"model.image_size ({img_size}) must be a multiple of 4 for mnist_cnn; resize the "
                "images in data.train_pp and data.eval_pp"
            )
        first, second, hidden = widths
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(in_chans, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.fc1 = nn.Linear(second * (img_size // 4) ** 2, hidden)
        self.drop = nn.Dropout(drop_rate)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] of images [B, in_chans, img_size, img_size]."""
        features = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        features = functional.max_pool2d(functional.relu(self.conv2(features)), 2)
        return self.fc2(self.drop(functional.relu(self.fc1(features.flatten(1)))))
