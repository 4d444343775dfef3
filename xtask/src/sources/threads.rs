//! Checks that the libraries start every thread through `sterna_ram::threads`, so that a VMM's hook runs on it.

/// Crates whose threads run the hook.
const CRATES: &[&str] = &[
    "crates/sterna/src/",
    "crates/sterna-opaque/src/",
    "crates/sterna-pager/src/",
    "crates/sterna-ram/src/",
    "crates/sterna-standby/src/",
    "crates/sterna-transport/src/",
];
/// The place of the calls, and simulated adapters, which are for tests.
const EXCEPT: &[&str] = &[
    "crates/sterna-ram/src/threads.rs",
    "crates/sterna-ram/src/threads/",
    "crates/sterna-transport/src/rdma/conformance/",
    "crates/sterna-transport/src/rdma/double/",
    "crates/sterna-transport/src/rdma/verbs/mock/",
];
const CALLS: &[&str] = &["thread::spawn(", "thread::Builder", "Builder::new()", "scope.spawn("];

/// Each line of a file that starts a thread by itself.
pub(super) fn wrong(name: &str, text: &str) -> Vec<String> {
    let is_of = |places: &[&str]| places.iter().any(|place| name.starts_with(place));
    if !is_of(CRATES) || is_of(EXCEPT) || name.ends_with("/tests.rs") {
        return Vec::new();
    }
    let code = text.lines().enumerate().take_while(|(_, line)| line.trim() != "#[cfg(test)]");
    let found = code.filter_map(|(at, line)| {
        let call = CALLS.iter().find(|call| !line.trim_start().starts_with("//") && line.contains(*call))?;
        Some(format!("{name}:{} calls {call}: start threads with sterna_ram::threads::NewThread", at + 1))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_that_is_started_without_the_hook_is_named_with_its_line() {
        let text =
            "// thread::spawn(\nstd::thread::spawn(|| ());\n#[cfg(test)]\nstd::thread::spawn(|| ());\n";

        assert_eq!(wrong("crates/sterna/src/a.rs", text).len(), 1);
        assert!(wrong("crates/sterna/src/a.rs", text)[0].starts_with("crates/sterna/src/a.rs:2 "));
        assert!(wrong("crates/sterna/src/a/tests.rs", text).is_empty());
        assert!(wrong("crates/sterna-ram/src/threads.rs", text).is_empty());
        assert!(wrong("crates/sterna-cli/src/a.rs", text).is_empty());
    }
}
