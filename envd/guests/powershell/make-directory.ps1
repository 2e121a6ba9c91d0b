# envd: make-directory
# Create a directory and its parents. Given: $path.
New-Item -ItemType Directory -Force -Path $path | Out-Null
