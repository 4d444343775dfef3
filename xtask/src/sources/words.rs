//! Words that the writing style of CONTRIBUTING.md bans, in comments and documents.
//!
//! Only words that are wrong in every sense are listed. A word with a second, legitimate sense ("behind" a proxy, "beside" a file) is
//! left to reviewers.

/// Banned, with what to write instead.
const BANNED: &[(&str, &str)] = &[
    ("nobody", "name who does not: no thread, no other process, no client"),
    ("whoever", "name who does: the caller, a new connection, the operator"),
    ("anew", "again, or connect again, allocate again"),
    ("for ever", "without end, or without limit"),
    ("for good", "permanently, or until the process ends"),
    ("such a one", "repeat the noun"),
    ("stands still", "is paused, or is stopped"),
    ("stand still", "be paused, or do not change"),
    ("says so", "name the message, the error or the event"),
];

/// Folders and files whose texts are not converted yet. Remove a line when its folder is.
const NOT_YET: &[&str] = &[
    // The comments of clap's structures are the text of `--help`.
    "crates/sterna-cli/src/cli",
    "crates/sterna-cli/src/commands/",
    // Inside of `global_asm!`.
    "crates/sterna-vmm/tests/common/guests.rs",
];

/// The comments of a Rust file that contain a banned word. `code spans` do not count, here and in documents.
pub fn in_comments(name: &str, text: &str) -> Vec<String> {
    let is_left_out =
        NOT_YET.iter().any(|begin| name.starts_with(begin)) || name.ends_with("sources/words.rs");
    if is_left_out {
        return Vec::new();
    }
    let comments = text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//"));
    comments.filter_map(|(at, line)| banned(name, at, &without_code(line))).collect()
}

/// The lines of a document that contain a banned word.
pub fn in_document(name: &str, text: &str) -> Vec<String> {
    text.lines().enumerate().filter_map(|(at, line)| banned(name, at, &without_code(line))).collect()
}

fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

fn banned(name: &str, at: usize, line: &str) -> Option<String> {
    let line = line.to_lowercase();
    let (word, better) = BANNED.iter().find(|(word, _)| super::has_word(&line, word))?;
    Some(format!("{name}:{} says \"{word}\" (CONTRIBUTING.md, Writing style): {better}", at + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_word_in_a_comment_is_wrong_and_in_code_is_not() {
        let text = "/// Nobody waits.\nlet nobody = 1;\n// Renewed.\n";

        let wrong = in_comments("crates/sterna-ram/src/lib.rs", text);

        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].starts_with("crates/sterna-ram/src/lib.rs:1 says \"nobody\""), "{wrong:?}");
        assert!(in_comments("crates/sterna-cli/src/cli.rs", text).is_empty(), "it is not converted yet");
    }

    #[test]
    fn code_spans_of_a_document_do_not_count() {
        assert!(in_document("docs/cli.md", "the user `nobody`").is_empty());
        assert_eq!(in_document("docs/cli.md", "it stands still").len(), 1);
    }
}
