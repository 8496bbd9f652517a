"""Modules that all other packages use: structs, axes of meshes, checks of arguments, the registry."""
