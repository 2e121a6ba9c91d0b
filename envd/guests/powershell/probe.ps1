# envd: probe
# Print a file's size in bytes, `absent`, or `other` for anything that is not a file. Given: $path.
$item = Get-Item -LiteralPath $path -Force -ErrorAction SilentlyContinue
if ($null -eq $item) { 'absent' } elseif ($item -is [IO.FileInfo]) { $item.Length } else { 'other' }
