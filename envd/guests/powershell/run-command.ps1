# envd: run-command
# Run the command on standard input (base64 of UTF-8) for `use-tool.ps1`, with the directory, environment and variables
# of the one before, which are kept in a file.
$command = [Text.Encoding]::UTF8.GetString([Convert]::FromBase64String(@($input) -join ''))
[Console]::OutputEncoding = [Text.UTF8Encoding]::new($false)
$ProgressPreference = 'SilentlyContinue'
$LASTEXITCODE = 0
$item = $null
$envd = @{ file = "$env:LOCALAPPDATA\envd-shell.xml"; code = 1; variables = @{} }
$envd.known = @((Get-Variable).Name)
try {
  $envd.kept = Import-Clixml -LiteralPath $envd.file
  foreach ($item in $envd.kept.environment.GetEnumerator()) { [Environment]::SetEnvironmentVariable($item.Key, $item.Value) }
  foreach ($item in $envd.kept.variables.GetEnumerator()) { Set-Variable -Name $item.Key -Value $item.Value }
  Set-Location -LiteralPath $envd.kept.directory
} catch { $item = $null }
try {
  . ([ScriptBlock]::Create("$command`n`$envd.succeeded = `$?"))
  $envd.code = if ($LASTEXITCODE) { $LASTEXITCODE } elseif ($envd.succeeded) { 0 } else { 1 }
} catch { [Console]::Error.WriteLine($_) }
foreach ($item in Get-Variable) {
  if ($item.Options -eq 'None' -and $item.Name -notin $envd.known) { $envd.variables[$item.Name] = $item.Value }
}
$envd.directory = (Get-Location -PSProvider FileSystem).ProviderPath
$envd.environment = [Environment]::GetEnvironmentVariables()
Export-Clixml -LiteralPath $envd.file -InputObject @{
  directory = $envd.directory; environment = $envd.environment; variables = $envd.variables
}
exit $envd.code
