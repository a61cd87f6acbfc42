"""The claims that this project grew from, one file each: a command that shows or refutes it."""
