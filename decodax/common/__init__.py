"""What every other package stands on: structs, axes of meshes, checks of arguments, the registry."""
