# Completion of backupd in bash: source <(backupd completion bash)
_backupd() {
    local answer
    COMPREPLY=()
    answer=$("$1" complete bash "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null </dev/null)
    if [[ $? -eq 3 ]]; then
        compopt -o default # the word is the name of a file
    elif [[ -n $answer ]]; then
        mapfile -t COMPREPLY <<<"$answer"
        [[ ${#COMPREPLY[@]} -eq 1 && $answer == *[:=] ]] && compopt -o nospace
    fi
    return 0
}
complete -F _backupd backupd
