"""Code that ``export`` copies into a folder, so that the folder works without this package."""
