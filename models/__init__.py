"""Models by name: `create_model` for students, `Teacher` for teachers, their `InputTransform`."""
