//! Parses a command from text into words, without a shell.

use std::fmt;
use std::str::FromStr;

/// A program and its arguments.
///
/// As text, words are separated by spaces, tabs and line ends:
/// - `'…'` keeps every character.
/// - `"…"` keeps every character except a backslash before `"` or `\`, which is removed.
/// - Outside of quotes, a backslash is removed and the next character is kept.
///
/// No other character is special: there are no variables, patterns or pipes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    program: String,
    arguments: Vec<String>,
}

/// A text that cannot be parsed as a [`CommandLine`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a command: {problem}")]
pub struct CommandLineError {
    text: String,
    problem: &'static str,
}

impl CommandLine {
    /// Makes a command from words that are already separate.
    pub fn new(program: impl Into<String>, arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { program: program.into(), arguments: arguments.into_iter().map(Into::into).collect() }
    }

    /// Returns the program: a path, or a name that is searched on the `PATH`.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Returns the arguments, without the program.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }
}

impl FromStr for CommandLine {
    type Err = CommandLineError;

    fn from_str(text: &str) -> Result<Self, CommandLineError> {
        let wrong = |problem| CommandLineError { text: text.to_owned(), problem };
        let mut words = split(text).map_err(wrong)?.into_iter();
        match words.next() {
            None => Err(wrong("it is empty; give a program and its arguments")),
            Some(program) if program.is_empty() => Err(wrong("the program's name is empty")),
            Some(program) => Ok(Self { program, arguments: words.collect() }),
        }
    }
}

/// Writes the command as text that parses into the same words.
impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_word(f, &self.program)?;
        self.arguments.iter().try_for_each(|word| {
            f.write_str(" ")?;
            write_word(f, word)
        })
    }
}

fn split(text: &str) -> Result<Vec<String>, &'static str> {
    if text.contains('\0') {
        return Err("it has a NUL character");
    }
    let mut words = Vec::new();
    // A word with quotes may be empty, so `Some("")` differs from `None`.
    let mut word: Option<String> = None;
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            ' ' | '\t' | '\n' | '\r' => words.extend(word.take()),
            '\'' => single_quoted(&mut rest, word.get_or_insert_default())?,
            '"' => double_quoted(&mut rest, word.get_or_insert_default())?,
            '\\' => {
                let next = rest
                    .next()
                    .ok_or("a backslash at its end escapes no character; write \\\\ for a backslash")?;
                word.get_or_insert_default().push(next);
            }
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

fn single_quoted(rest: &mut std::str::Chars<'_>, word: &mut String) -> Result<(), &'static str> {
    for c in rest {
        if c == '\'' {
            return Ok(());
        }
        word.push(c);
    }
    Err("a quote ' is not closed")
}

fn double_quoted(rest: &mut std::str::Chars<'_>, word: &mut String) -> Result<(), &'static str> {
    const OPEN: &str = "a quote \" is not closed";
    while let Some(c) = rest.next() {
        match c {
            '"' => return Ok(()),
            '\\' => match rest.next().ok_or(OPEN)? {
                next @ ('"' | '\\') => word.push(next),
                next => word.extend(['\\', next]),
            },
            c => word.push(c),
        }
    }
    Err(OPEN)
}

fn write_word(f: &mut fmt::Formatter<'_>, word: &str) -> fmt::Result {
    let is_plain = |c: char| !c.is_whitespace() && !matches!(c, '\'' | '"' | '\\');
    if !word.is_empty() && word.chars().all(is_plain) {
        f.write_str(word)
    } else {
        write!(f, "\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        let line: CommandLine = text.parse().expect(text);
        [line.program().to_owned()].into_iter().chain(line.arguments().iter().cloned()).collect()
    }

    #[test]
    fn words_are_split_by_the_rule() {
        assert_eq!(words("/bin/a  b\tc\n"), ["/bin/a", "b", "c"]);
        assert_eq!(words(r#"a 'b "c" \' "d 'e' \" \\ \n""#), ["a", r#"b "c" \"#, r#"d 'e' " \ \n"#]);
        assert_eq!(words(r#"a\ b c\'d ""  '' e"f"'g'h"#), ["a b", "c'd", "", "", "efgh"]);
        assert_eq!(words("a $HOME * | ; ~ ä"), ["a", "$HOME", "*", "|", ";", "~", "ä"]);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, what) in [
            ("", "empty"),
            (" \t", "empty"),
            ("'' a", "name is empty"),
            ("a 'b", "quote '"),
            ("a \"b", "quote \""),
            ("a \"b\\", "quote \""),
            ("a\\", "backslash"),
            ("a\0b", "NUL"),
        ] {
            let error = text.parse::<CommandLine>().expect_err(text).to_string();
            assert!(error.contains(what), "{text:?}: {error}");
        }
    }

    #[test]
    fn printed_commands_are_read_as_the_same_words() {
        let mut random = sterna_testing::random("printed_commands_are_read_as_the_same_words");
        let letters = ['a', ' ', '\'', '"', '\\', '\n', 'é', '$'];
        for _ in 0..1000 {
            let mut word = |least| {
                let length = random.usize(least..6);
                (0..length).map(|_| letters[random.usize(..letters.len())]).collect::<String>()
            };
            let line = CommandLine::new(word(1), [word(0), word(0)]);

            assert_eq!(line.to_string().parse(), Ok(line));
        }
    }
}
