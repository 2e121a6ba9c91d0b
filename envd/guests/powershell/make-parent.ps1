# envd: make-parent
# Create the directory that a file is to be written to, and its parents. Given: $path.
New-Item -ItemType Directory -Force -Path (Split-Path -Parent $path) | Out-Null
