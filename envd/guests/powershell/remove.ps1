# envd: remove
# Remove a file or a directory, if it exists. Given: $path.
if (Test-Path -LiteralPath $path) { Remove-Item -LiteralPath $path -Recurse -Force }
