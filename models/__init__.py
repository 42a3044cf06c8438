"""Models by name: `create_model` for students, `Teacher` for teachers, views of their input."""

from models.factory import create_model, export_model, find_model_name
from models.teacher import Teacher, create_teachers
from models.views import View, create_view

__all__ = [
    "Teacher",
    "View",
    "create_model",
    "create_teachers",
    "create_view",
    "export_model",
    "find_model_name",
]
