"""Classification of images, one class or several classes each, with or without teachers."""
