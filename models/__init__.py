"""Models by name: `create_model` for students, `Teacher` for teachers, their `InputTransform`."""

from models import cifar_resnet as cifar_resnet
from models import mlp as mlp
from models import mnist_cnn as mnist_cnn
from models import reused_head as reused_head
from models import sincos_vit as sincos_vit
from models import transformer as transformer
from models.batch_norm import has_batch_norm, synchronise_batch_norm
from models.delta import kimi as kimi
from models.delta import qwen as qwen
from models.delta import qwen_next as qwen_next
from models.delta import rules as rules
from models.delta import rwkv as rwkv
from models.delta.kernels import check_kernels
from models.embedding import (
    Embedded,
    Embedder,
    FeatureTeacher,
    create_feature_teachers,
    embed,
    find_grid,
    require_features,
)
from models.factory import create_model, export_model, find_model_name, settle_model
from models.features import FeatureTap, get_feature_shapes
from models.freezing import freeze
from models.kept_tokens import ClassTokenScores
from models.mlp import RowTeacher, Standardise
from models.patches import apply_patches, check_patch_names
from models.remat import recompute_blocks, scan_blocks
from models.reused_head import PROJECTED, SIMKD, ReusedClassifier
from models.teacher import (
    EMA,
    PAST,
    SELVES,
    FrozenModel,
    SeenByStudent,
    Teacher,
    create_teachers,
    get_teacher_sections,
    hash_teacher,
    open_teacher,
    refuse_image_keys,
)
from models.teacher_classes import check_teacher_names
from models.token_teacher import (
    TokenTeacher,
    create_token_teachers,
    list_language_models,
)
from models.trained import TrainedModel, open_trained
from models.transforms import InputTransform, create_input_transform

__all__ = [
    "EMA",
    "PAST",
    "PROJECTED",
    "SELVES",
    "SIMKD",
    "ClassTokenScores",
    "Embedded",
    "Embedder",
    "FeatureTap",
    "FeatureTeacher",
    "FrozenModel",
    "InputTransform",
    "ReusedClassifier",
    "RowTeacher",
    "SeenByStudent",
    "Standardise",
    "Teacher",
    "TokenTeacher",
    "TrainedModel",
    "apply_patches",
    "check_kernels",
    "check_patch_names",
    "check_teacher_names",
    "create_feature_teachers",
    "create_input_transform",
    "create_model",
    "create_teachers",
    "create_token_teachers",
    "embed",
    "export_model",
    "find_grid",
    "find_model_name",
    "freeze",
    "get_feature_shapes",
    "get_teacher_sections",
    "has_batch_norm",
    "hash_teacher",
    "list_language_models",
    "open_teacher",
    "open_trained",
    "recompute_blocks",
    "refuse_image_keys",
    "require_features",
    "scan_blocks",
    "settle_model",
    "synchronise_batch_norm",
]
