//! The survivor of a protection is protected again, by another host and by the restored host.

use super::*;

/// Protects `from` with the new standby `to`, and checks the generation.
fn protect_again(site: &Site, from: &str, to: &str, generation: u64, more: &[&str]) -> (Process, Process) {
    let standby = site.start(to, vm(site, to).args(["--lease=2s", "--incoming=defer"]));
    let protects = Process(site.protect(from, to, more).spawn().unwrap());
    site.await_checkpoints(to, 10);
    assert_eq!(site.report(from)["generation"], generation);
    assert_eq!(site.report(to)["contact"]["generation"], generation);
    (standby, protects)
}

#[test]
fn survivor_is_protected_by_a_third_host_and_by_the_restored_one_as_the_next_generation() {
    let mut pair = Pair::new(&[]);
    assert_eq!(pair.report("a")["generation"], 1);
    let claims = || std::fs::read_dir(pair.site.path("arbiter")).unwrap().count();

    pair.primary.kill();
    wait("the survivor", || pair.site.is_running("b"));
    assert_eq!(pair.protects.wait(), Some(3));
    assert_eq!(claims(), 1);

    let (mut third, mut protects) = protect_again(&pair.site, "b", "c", 2, &["--channels=2"]);
    pair.standby.kill();
    wait("the third host's guest", || pair.site.is_running("c"));
    assert_eq!(protects.wait(), Some(3), "{}", pair.site.protect_said());
    // The claims of the previous generation are still there.
    assert_eq!(claims(), 2);
    assert_consistent(&pair.site, "c");

    // The survivor still has the channels setting of the previous protection.
    let (_first, mut protects) = protect_again(&pair.site, "c", "a", 3, &[]);
    third.kill();
    wait("the restored host's guest", || pair.site.is_running("a"));
    assert_eq!(protects.wait(), Some(3), "{}", pair.site.protect_said());
    assert_eq!(claims(), 3);
    assert_consistent(&pair.site, "a");
}

#[test]
fn guest_that_was_handed_over_and_back_goes_on_under_the_next_generation() {
    let mut pair = Pair::new(&[]);
    assert!(command("takeover", &pair.socket("b"), &["--planned"]).status.success());
    wait("the guest", || pair.is_running("b"));
    assert_eq!(pair.protects.wait(), Some(0));

    // The old primary's VM has exited, or is killed here.
    pair.primary.kill();
    let (_first, mut protects) = protect_again(&pair.site, "b", "a", 2, &["--channels=2"]);
    assert!(command("takeover", &pair.socket("a"), &["--planned"]).status.success());
    wait("the guest", || pair.is_running("a"));
    assert_eq!(protects.wait(), Some(0), "{}", pair.protect_said());
    assert_consistent(&pair.site, "a");
}
