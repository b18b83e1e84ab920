"""Where things run. The only room that imports Ray, and only where Ray is used."""
