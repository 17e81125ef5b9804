# Completion of backupd in fish: backupd completion fish | source
function __backupd_words
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found (command $words[1] complete fish -- $words[2..-1] "$current" 2>/dev/null </dev/null)
    if test $status -eq 3
        __fish_complete_path "$current"
    else
        printf '%s\n' $found
    end
end
complete -c backupd -f -a '(__backupd_words)'
