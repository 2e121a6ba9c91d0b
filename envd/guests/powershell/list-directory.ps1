# envd: list-directory
# Print `d` or `f`, the name and NUL for each entry of a directory; exit with 66 without one. Given: $path.
if (-not (Test-Path -LiteralPath $path -PathType Container)) { exit 66 }
foreach ($entry in Get-ChildItem -LiteralPath $path -Force) {
  $kind = if ($entry.PSIsContainer) { 'd' } else { 'f' }
  [Console]::Out.Write($kind + $entry.Name + [char]0)
}
