"""Teachers: frozen models, their classes, features and tokens."""
