"""Networks for images, categories and nested observations."""
