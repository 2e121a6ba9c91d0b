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
    if ([IO.Directory]::Exists($path)) { throw "$path is a directory; list it instead" }
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
    $encoded = [Convert]::ToBase64String([Text.Encoding]::Unicode.GetBytes($runner))
    $line = "/d /c powershell.exe -NoProfile -NonInteractive -OutputFormat Text -EncodedCommand $encoded 2>&1"
    $start = [Diagnostics.ProcessStartInfo]::new($env:ComSpec, $line)
    $start.UseShellExecute = $false
    $start.CreateNoWindow = $true
    $start.RedirectStandardInput = $true
    $start.RedirectStandardOutput = $true
    $start.WorkingDirectory = $env:USERPROFILE
    $clock = [Diagnostics.Stopwatch]::StartNew()
    $process = [Diagnostics.Process]::Start($start)
    $process.StandardInput.WriteLine([Convert]::ToBase64String([Text.Encoding]::UTF8.GetBytes($asked.command)))
    $process.StandardInput.Close()
    $stream = $process.StandardOutput.BaseStream
    $buffer = [byte[]]::new(65536)
    $head = [IO.MemoryStream]::new()
    $tail = [IO.MemoryStream]::new()
    $response.left_out_bytes = 0
    $read = $stream.ReadAsync($buffer, 0, $buffer.Length)
    $is_open = $true
    while ($clock.ElapsedMilliseconds -lt 1000 * $asked.timeout_s) {
      # A program in the background may keep the output open.
      $has_ended = $process.HasExited
      if ($is_open -and $read.Wait(50)) {
        $count = $read.Result
        $room = [Math]::Min($count, 16384 - $head.Length)
        $head.Write($buffer, 0, $room)
        $tail.Write($buffer, $room, $count - $room)
        if ($tail.Length -gt 16384) {
          $bytes = $tail.ToArray()
          $response.left_out_bytes += $bytes.Length - 16384
          $tail.SetLength(0)
          $tail.Write($bytes, $bytes.Length - 16384, 16384)
        }
        $is_open = $count -gt 0
        if ($is_open) { $read = $stream.ReadAsync($buffer, 0, $buffer.Length) }
      } elseif ($has_ended) { break } elseif (-not $is_open) { $process.WaitForExit(50) | Out-Null }
    }
    if ($process.HasExited) { $response.exit_code = $process.ExitCode }
    else {
      $response.timed_out = $true
      $kill = [Diagnostics.ProcessStartInfo]::new('taskkill.exe', "/T /F /PID $($process.Id)")
      $kill.UseShellExecute = $false
      $kill.CreateNoWindow = $true
      [Diagnostics.Process]::Start($kill).WaitForExit()
    }
    $response.head = [Convert]::ToBase64String($head.ToArray())
    $response.tail = [Convert]::ToBase64String($tail.ToArray())
  }
} catch { $response.error = $_.Exception.GetBaseException().Message }
ConvertTo-Json $response -Compress
