# envd: use-tool
# Use a tool of an agent: perform the request in $request (JSON) and print the response (JSON). Commands are run by
# `run-command.ps1`, whose text is $runner, in a process of their own.
$asked = ConvertFrom-Json $request
$response = @{}
try {
  if ($asked.op -ne 'shell') {
    $path = [IO.Path]::GetFullPath([IO.Path]::Combine($env:USERPROFILE, $asked.path))
    $response.path = $path
  }
  if ($asked.op -eq 'read') {
    if ([IO.Directory]::Exists($path)) { throw "${path}: Is a directory" }
    if (-not [IO.File]::Exists($path)) { throw "${path}: No such file or directory" }
    $file = [IO.File]::Open($path, 'Open', 'Read', 'ReadWrite')
    try {
      $response.size = $file.Length
      $data = [byte[]]::new([Math]::Min($file.Length, $asked.limit))
      $response.data = [Convert]::ToBase64String($data, 0, $file.Read($data, 0, $data.Length))
    } finally { $file.Dispose() }
  } elseif ($asked.op -eq 'write') {
    $temporary = "$path.envd-new"
    [IO.Directory]::CreateDirectory([IO.Path]::GetDirectoryName($path)) | Out-Null
    try {
      [IO.File]::WriteAllBytes($temporary, [Convert]::FromBase64String($asked.data))
      if ([IO.File]::Exists($path)) { [IO.File]::Replace($temporary, $path, [NullString]::Value) }
      else { [IO.File]::Move($temporary, $path) }
    } finally { [IO.File]::Delete($temporary) }
  } elseif ($asked.op -eq 'list') {
    if (-not [IO.Directory]::Exists($path)) { throw "${path}: No such file or directory" }
    $entries = @(Get-ChildItem -LiteralPath $path -Force)
    $response.count = $entries.Count
    $response.rows = @(foreach ($entry in $entries | Select-Object -First 1000) {
      if ($entry.PSIsContainer) { "$($entry.Name)/" } else { "$($entry.Name) ($($entry.Length) bytes)" }
    }) -join "`n"
  } else {
    # Not a pipe: a program in the background would keep it open.
    $output = [IO.Path]::GetTempFileName()
    $encoded = [Convert]::ToBase64String([Text.Encoding]::Unicode.GetBytes($runner))
    $line = "powershell.exe -NoProfile -NonInteractive -OutputFormat Text -EncodedCommand $encoded"
    $start = [Diagnostics.ProcessStartInfo]::new($env:ComSpec, "/d /s /c `"$line > `"$output`" 2>&1`"")
    $start.UseShellExecute = $false
    $start.CreateNoWindow = $true
    $start.RedirectStandardInput = $true
    $start.WorkingDirectory = $env:USERPROFILE
    $process = [Diagnostics.Process]::Start($start)
    $process.StandardInput.WriteLine([Convert]::ToBase64String([Text.Encoding]::UTF8.GetBytes($asked.command)))
    $process.StandardInput.Close()
    if ($process.WaitForExit(1000 * $asked.timeout_s)) { $response.exit_code = $process.ExitCode }
    else {
      $response.timed_out = $true
      $kill = [Diagnostics.ProcessStartInfo]::new('taskkill.exe', "/T /F /PID $($process.Id)")
      $kill.UseShellExecute = $false
      $kill.CreateNoWindow = $true
      [Diagnostics.Process]::Start($kill).WaitForExit(5000) | Out-Null
    }
    $file = [IO.File]::Open($output, 'Open', 'Read', 'ReadWrite')
    $size = $file.Length
    $tail_at = [Math]::Max(16384, $size - 16384)
    $response.left_out_bytes = [Math]::Max(0, $size - 32768)
    $buffer = [byte[]]::new(16384)
    $response.head = [Convert]::ToBase64String($buffer, 0, $file.Read($buffer, 0, 16384))
    $file.Position = $tail_at
    $response.tail = [Convert]::ToBase64String($buffer, 0, $file.Read($buffer, 0, 16384))
    $file.Dispose()
    Remove-Item -LiteralPath $output -Force -ErrorAction SilentlyContinue
  }
} catch { $response.error = $_.Exception.GetBaseException().Message }
ConvertTo-Json $response -Compress
