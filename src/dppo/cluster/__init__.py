"""The processes of a run. The only room that imports Ray, and only where Ray is used."""
