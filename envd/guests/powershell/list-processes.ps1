# envd: list-processes
# Print `R` and the name of each process, without `.exe`, one a line.
foreach ($process in Get-Process) { 'R ' + $process.ProcessName }
