# envd: query-registry
# Print a registry value as JSON: found, value. Given: $hive, $key, $name.
# The agent runs as the system, so the user's hive is found by the user who is logged in.
if ($hive -eq 'HKEY_CURRENT_USER') {
  $user = (Get-CimInstance Win32_ComputerSystem).UserName
  if (-not $user) { throw 'no user is logged in' }
  $sid = [Security.Principal.NTAccount]::new($user).Translate([Security.Principal.SecurityIdentifier]).Value
  $hive = "HKEY_USERS\$sid"
}
$item = Get-Item -LiteralPath "Registry::$hive\$key" -ErrorAction SilentlyContinue
$value = if ($null -eq $item) { $null } else { $item.GetValue($name, $null, 'DoNotExpandEnvironmentNames') }
ConvertTo-Json -Compress -InputObject @{ found = ($null -ne $value); value = $value }
