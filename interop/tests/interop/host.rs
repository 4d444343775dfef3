//! Runs the scenarios of plain instructions on this host's KVM.
#![allow(clippy::print_stderr, missing_docs)]

use sterna_interop::scenarios::ALL;

#[test]
fn plain_scenarios_on_this_host_lose_nothing() {
    if let Err(error) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        eprintln!("SKIPPED plain_scenarios_on_this_host_lose_nothing: /dev/kvm: {error}");
        return;
    }
    for scenario in ALL.iter().filter(|scenario| scenario.plain) {
        let begin = std::time::Instant::now();
        let result = (scenario.run)();
        eprintln!("{}: {:?}", scenario.name, begin.elapsed());
        assert_eq!(result, Ok(()), "{}", scenario.name);
    }
}
