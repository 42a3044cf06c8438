"""The op that shows an image as a teacher elsewhere saw it."""

from __future__ import annotations

import numpy as np

from big_vision.pp import pil, policies
from big_vision.pp.ops_augment import require_rgb
from big_vision.pp.ops_image import Size, get_height_width
from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import RandomTransform, on_key_at_random
from big_vision.pp.stored_views import ViewForm, ViewTable, draw_view
from big_vision.tensorflow_setup import tf
from utils.errors import UserError

# Box, flip, operations, their arguments, box to erase.
Drawn = tuple[np.ndarray, np.bool_, np.ndarray, np.ndarray, np.ndarray]
# No operation, in a row.
NOTHING = 255


@on_key_at_random
def get_stored_view(place: str, size: Size) -> RandomTransform:
    """Crop the part of the image that a folder holds for this epoch and example, resized to `size`.

    If the folder says so: mirrored, after torchvision's operations, with a black box.
    """
    table = ViewTable(place)

    def stored_view(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        form = read_form(table, place, size)
        kinds = (tf.int32, tf.bool, tf.int32, tf.float32, tf.int32)

        def look_up(example: np.ndarray, shape: np.ndarray) -> Drawn:
            return get_view(table, place, example, shape)

        view = tf.numpy_function(look_up, [randomness.example, tf.shape(image)], kinds)
        box, flip, numbers, arguments, erased = view
        for value, count in ((box, 4), (numbers, None), (arguments, None), (erased, 4)):
            value.set_shape([count])
        crop = tf.slice(image, tf.concat([box[:2], [0]], 0), tf.concat([box[2:], [-1]], 0))
        crop.set_shape([None, None, image.shape[-1]])
        view = pil.resize(crop, get_height_width(size), form.method)
        flip.set_shape([])
        view = tf.cond(flip, lambda: tf.reverse(view, [1]), lambda: view)
        if form.layers or (form.rules and form.rules.layers):
            require_rgb(image, "stored_view")
            view = apply_operations(view, form, numbers, arguments)
        return erase(view, erased) if form.erased else view

    return stored_view


def read_form(table: ViewTable, place: str, size: Size) -> ViewForm:
    """Return the form of the views; a UserError for a size at which they would be others."""
    form = table.open().form
    if form.is_bound and get_height_width(size) != form.size:
        raise UserError(
            f"stored_view ({place!r}): its operations and boxes were drawn for images of "
            f"{form.size[0]} x {form.size[1]} and hold for no other size; write that size"
        )
    return form


def apply_operations(
    image: tf.Tensor, form: ViewForm, numbers: tf.Tensor, arguments: tf.Tensor
) -> tf.Tensor:
    """Apply torchvision's operations of a view, or those of timm that a seed has drawn."""
    names, way, fill = tuple(policies.TRIVIAL), policies.NEAREST, [0.0] * 3
    if form.rules is not None:
        names, fill = policies.RANDAUG, [float(level) for level in form.rules.fill]
        way = policies.BICUBIC if form.method == "bicubic" else policies.BILINEAR
    layers = policies.Layers(numbers, arguments, tf.zeros_like(numbers) + way)
    return policies.apply_layers(image, names, layers, fill)


def get_view(table: ViewTable, place: str, example: np.ndarray, shape: np.ndarray) -> Drawn:
    """Return box, flip, operations, their arguments and the box to erase for an image's shape."""
    row = table.get(int(example[0]), int(example[1]))
    form = table.open().form
    if form.rules is not None:
        drawn = draw_view(int(row["seed"]), (int(shape[0]), int(shape[1])), form.rules)
        box = np.array(drawn.box, np.int32)
        return box, np.bool_(drawn.flip), drawn.numbers, drawn.arguments, np.zeros(4, np.int32)
    y, x, height, width = box = row["box"].astype(np.int32)
    if not (height and width and y + height <= shape[0] and x + width <= shape[1]):
        raise UserError(
            f"box {box.tolist()} is outside its image of {shape[0]} x {shape[1]}: views of other "
            f"images; name those of {place!r} by --ids, or bring the original ones"
        )
    numbers, arguments = np.zeros(0, np.int32), np.zeros(0, np.float32)
    if form.layers:
        numbers, arguments = row["numbers"].astype(np.int32), row["arguments"]
        numbers = np.where(numbers == NOTHING, -1, numbers).astype(np.int32)
    erased = row["erased"].astype(np.int32) if form.erased else np.zeros(4, np.int32)
    return box, np.bool_(row["flip"]), numbers, arguments, erased


def erase(image: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    """Blacken the box (y, x, height, width)."""
    y, x, height, width = tf.unstack(box)
    rows, columns = tf.range(tf.shape(image)[0]), tf.range(tf.shape(image)[1])
    is_inside = ((rows >= y) & (rows < y + height))[:, None]
    is_inside &= ((columns >= x) & (columns < x + width))[None]
    return tf.where(is_inside[..., None], tf.zeros_like(image), image)
