//! Selects the scenarios of a lab that run.

use crate::scenarios::Failure;

/// The selected scenarios, or the bench, or disturbed migrations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    /// Runs the bench and no scenario.
    pub(super) is_bench: bool,
    is_quick: bool,
    /// Runs this many disturbed migrations and no scenario.
    pub(super) reliability: Option<u64>,
    /// Seed of the disturbances.
    pub(super) seed: u64,
    /// Number of the first disturbed migration.
    pub(super) from: u64,
    /// Also runs the scenarios that take long.
    long: bool,
    /// Runs only scenarios whose name contains this text, including long ones.
    part_of_name: Option<String>,
}

impl Selection {
    /// Variable of init's environment that contains the selection. The kernel takes it from its command line,
    /// where blanks separate words. Underscores therefore replace blanks.
    const VARIABLE: &str = "LAB_SELECTION";
    const BETWEEN: &str = "|";
    const LONG: &str = "--all";
    const BENCH: &str = "--bench";
    const QUICK: &str = "--quick";
    const RELIABILITY: &str = "--reliability";
    const SEED: &str = "--seed=";
    const FROM: &str = "--from=";
    const PART: &str = "--only=";
    /// Default number of disturbed migrations.
    const COUNT: u64 = 60;

    /// Parses the arguments: `--all`, or `--only=TEXT` with an underscore for each blank, or `--bench` and
    /// `--quick`, or `--reliability` with optional `=COUNT`, `--seed=NUMBER` and `--from=NUMBER`.
    ///
    /// # Errors
    /// An argument that is none of these.
    pub fn of_arguments(arguments: impl IntoIterator<Item = String>) -> Result<Self, Failure> {
        let mut selection = Self::default();
        for argument in arguments {
            if let Some(count) = argument.strip_prefix(Self::RELIABILITY) {
                selection.reliability = Some(if count.is_empty() { Self::COUNT } else { number(&argument)? });
                continue;
            }
            if argument.starts_with(Self::SEED) {
                selection.seed = number(&argument)?;
                continue;
            }
            if argument.starts_with(Self::FROM) {
                selection.from = number(&argument)?;
                continue;
            }
            match argument.strip_prefix(Self::PART) {
                Some(text) if !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c == '|') => {
                    selection.part_of_name = Some(text.replace('_', " "));
                }
                None if argument == Self::LONG => selection.long = true,
                None if argument == Self::BENCH => selection.is_bench = true,
                None if argument == Self::QUICK => selection.is_quick = true,
                _ => {
                    let (long, part, reliability) = (Self::LONG, Self::PART, Self::RELIABILITY);
                    return Err(format!(
                        "{argument:?} is not {long}, nor {part}TEXT with an underscore for each blank of the text, nor \
                         {reliability}[=COUNT] with {}NUMBER and {}NUMBER",
                        Self::SEED,
                        Self::FROM
                    ));
                }
            }
        }
        Ok(selection)
    }

    /// Whether this is the default selection.
    pub(super) fn is_all_short(&self) -> bool {
        *self == Self::default()
    }

    /// The selection on the kernel's command line.
    pub(super) fn of_environment() -> Self {
        let words = std::env::var(Self::VARIABLE).unwrap_or_default();
        Self::of_arguments(words.split(Self::BETWEEN).filter(|word| !word.is_empty()).map(str::to_owned))
            .unwrap_or_default()
    }

    /// The word for the kernel's command line.
    pub(super) fn for_kernel(&self) -> String {
        let part = self.part_of_name.as_ref().map(|text| format!("{}{}", Self::PART, text.replace(' ', "_")));
        let switches = [(self.long, Self::LONG), (self.is_bench, Self::BENCH), (self.is_quick, Self::QUICK)];
        let switches = switches.into_iter().filter(|(is_on, _)| *is_on).map(|(_, word)| word.to_owned());
        let count = self.reliability.map(|count| format!("{}={count}", Self::RELIABILITY));
        let seed = (self.seed != 0).then(|| format!("{}{}", Self::SEED, self.seed));
        let from = (self.from != 0).then(|| format!("{}{}", Self::FROM, self.from));
        let words: Vec<_> = part.into_iter().chain(switches).chain(count).chain(seed).chain(from).collect();
        format!("{}={}", Self::VARIABLE, words.join(Self::BETWEEN))
    }

    /// Whether the bench measures only a few rows.
    pub(crate) fn is_quick(&self) -> bool {
        self.is_quick
    }

    /// Whether the scenario with this name runs.
    pub(crate) fn takes(&self, name: &str, is_long: bool) -> bool {
        match &self.part_of_name {
            Some(text) => name.contains(text.as_str()),
            None => self.long || !is_long,
        }
    }
}

/// The number after the equals sign.
fn number(argument: &str) -> Result<u64, Failure> {
    let number = argument.split_once('=').and_then(|(_, text)| text.parse().ok());
    number.ok_or_else(|| format!("{argument:?} has no number after its equals sign"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arguments: &[&str]) -> Selection {
        Selection::of_arguments(arguments.iter().map(|text| (*text).to_owned())).unwrap()
    }

    #[test]
    fn takes_what_is_short_what_is_named_or_all() {
        let cases = [
            (of(&[]), [true, false, false]),
            (of(&["--all"]), [true, true, true]),
            (of(&["--only=QEMU_to"]), [false, true, false]),
        ];

        for (selection, wanted) in cases {
            let took = [("short", false), ("QEMU to QEMU", true), ("long", true)]
                .map(|(name, is_long)| selection.takes(name, is_long));
            assert_eq!(took, wanted, "{selection:?}");
        }
    }

    #[test]
    fn words_of_the_kernels_line_have_no_blanks_and_say_the_same() {
        let words = [
            "--all",
            "--only=QEMU_to_QEMU,_dynamic",
            "--bench",
            "--quick",
            "--reliability=9",
            "--seed=7",
            "--from=4",
        ];
        let selection = of(&words);
        let line = selection.for_kernel();

        let (_, words) = line.split_once('=').unwrap();
        assert!(!line.contains(' '), "{line}");
        assert_eq!(of(&words.split(Selection::BETWEEN).collect::<Vec<_>>()), selection);
    }

    #[test]
    fn unknown_arguments_are_refused() {
        assert!(Selection::of_arguments(["--some".to_owned()]).is_err());
        assert!(Selection::of_arguments(["--only=".to_owned()]).is_err());
        assert!(Selection::of_arguments(["--reliability=many".to_owned()]).is_err());
        assert!(Selection::of_arguments(["--seed".to_owned()]).is_err());
    }

    #[test]
    fn migrations_that_are_disturbed_have_a_count_and_a_seed() {
        let drawn = |selection: Selection| (selection.reliability, selection.seed, selection.from);

        assert_eq!(drawn(of(&["--reliability"])), (Some(Selection::COUNT), 0, 0));
        assert_eq!(drawn(of(&["--reliability=3", "--seed=5", "--from=20"])), (Some(3), 5, 20));
    }
}
