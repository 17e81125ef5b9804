#compdef backupd
# Completion of backupd in zsh: source <(backupd completion zsh), or this file as _backupd in a folder of $fpath
_backupd() {
    local answer code
    local -a found
    answer=$("${(Q)words[1]}" complete zsh -- "${(@Q)words[2,CURRENT]}" 2>/dev/null </dev/null)
    code=$?
    if (( code == 3 )); then
        _files
    elif [[ -n $answer ]]; then
        found=("${(@f)answer}")
        _describe -t values backupd found
    fi
}
if [[ ${funcstack[1]} == _backupd ]]; then
    _backupd "$@"
else
    compdef _backupd backupd
fi
