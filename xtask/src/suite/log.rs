//! Reads the output of test programs that use libtest.

/// Numbers of tests in a test program's output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    /// Tests that did not run: marked `#[ignore]`, or reported as `SKIPPED`.
    pub skipped: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// The sums of all `test result:` lines. `skips` tests reported that they could not run; libtest
/// counts these as passed.
pub fn counts(log: &str, skips: u64) -> Counts {
    let mut counts = Counts::default();
    // The line may follow output of a test that has no newline at its end.
    for (_, line) in log.lines().filter_map(|line| line.split_once("test result: ")) {
        let number = |word: &str| -> u64 {
            let before = line.split(';').find_map(|part| part.trim().strip_suffix(word)).unwrap_or_default();
            before.trim().rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        counts.add(&Counts {
            passed: number(" passed"),
            failed: number(" failed"),
            skipped: number(" ignored"),
        });
    }
    let skips = skips.min(counts.passed);
    Counts { passed: counts.passed - skips, skipped: counts.skipped + skips, ..counts }
}

/// Lines of the form `SKIPPED name: reason`, which may follow an unfinished line of libtest.
pub fn skips(log: &str) -> Vec<String> {
    log.lines().filter_map(|line| Some(line[line.find("SKIPPED ")?..].trim_end().to_owned())).collect()
}

/// The last lines of programs that are no tests.
///
/// Examples: `demo-loop: ok. 2 passed …`, `60 passed, 0 failed (…)`.
pub fn closings(log: &str) -> impl Iterator<Item = &str> {
    let closes =
        |line: &str| line.contains(": ok. ") || line.contains(" passed, ") && line.contains(" failed");
    log.lines().filter(move |line| closes(line) && !line.contains("test result: "))
}

/// Those of `tests` that failed.
pub fn failed(log: &str, tests: &[String]) -> Vec<String> {
    let listed = |name: &str| log.lines().any(|line| line.trim_end() == format!("    {name}"));
    let is_final = log.contains("\nfailures:\n");
    tests.iter().filter(|name| is_final && listed(name)).cloned().collect()
}

/// The tests that were running when the output ended.
///
/// libtest starts `threads` tests in parallel, in the order of `tests`.
pub fn running<'a>(log: &str, tests: &'a [String], threads: usize) -> Vec<&'a str> {
    let ended = |name: &str| {
        let begun = format!("test {name} ... ");
        let result = |rest: &str| ["ok", "FAILED", "ignored"].iter().any(|word| rest.starts_with(word));
        log.lines().any(|line| line.strip_prefix(begun.as_str()).is_some_and(result))
    };
    let open: Vec<&str> = tests.iter().map(String::as_str).filter(|name| !ended(name)).collect();
    open.into_iter().take(threads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "running 4 tests\ntest a ... ok\ntest c ... FAILED\nSKIPPED a: no KVM\n\
        test result: FAILED. 7 passed; 1 failed; 2 ignored; 0 measured; 3 filtered out; finished in 0.0s\n";

    #[test]
    fn counts_take_skipped_tests_out_of_those_that_passed() {
        assert_eq!(counts(LOG, 1), Counts { passed: 6, failed: 1, skipped: 3 });
        assert_eq!(counts(&LOG.repeat(2), 0), Counts { passed: 14, failed: 2, skipped: 4 });
        assert_eq!(counts("no test", 3), Counts::default());
    }

    #[test]
    fn closings_are_those_of_other_programs() {
        let log = format!("{LOG}demo-loop: ok. 2 passed\n60 passed, 0 failed (3.1 s)\n");

        assert_eq!(
            closings(&log).collect::<Vec<_>>(),
            ["demo-loop: ok. 2 passed", "60 passed, 0 failed (3.1 s)"]
        );
    }

    #[test]
    fn skips_are_found_behind_an_unfinished_line() {
        assert_eq!(skips("test a ... SKIPPED a: no KVM\nok"), ["SKIPPED a: no KVM"]);
    }

    #[test]
    fn failed_are_those_of_the_last_list() {
        let tests: Vec<String> = ["a", "b", "c"].map(str::to_owned).to_vec();
        let log = format!("{LOG}\nfailures:\n\n---- c stdout ----\n\nfailures:\n    c\n\n");

        assert_eq!(failed(&log, &tests), ["c"]);
        assert_eq!(failed("    c\n", &tests), [""; 0]);
    }

    #[test]
    fn running_names_the_first_tests_that_have_not_ended() {
        let tests: Vec<String> = ["a", "b", "c", "d", "e"].map(str::to_owned).to_vec();

        assert_eq!(running(LOG, &tests, 2), ["b", "d"]);
    }
}
