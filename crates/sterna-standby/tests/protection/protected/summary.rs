//! Checkpoints that change in transit: their summary detects the change (`specs/replica.md §7`).

use super::led::{Led, bytes_of, noise};
use super::*;

#[test]
fn byte_that_changes_on_its_way_drops_the_checkpoint_and_the_one_before_is_taken_over() {
    let (zstd, all) = (Compression::Zstd, PLAIN);
    let unstaged = Way { buffer_bytes: 4096, ..all };
    let mut ways = vec![all, Way { delta: true, ..all }, unstaged, Way { lanes: 2, ..unstaged }];
    ways.push(Way { delta: true, ..unstaged });
    for (lanes, delta) in [(1, false), (1, true), (4, false), (4, true)] {
        ways.push(Way { lanes, delta, ..all });
        ways.push(Way { lanes, delta, compression: zstd, ..all });
    }
    // The standby waits for the end of the lease before it takes over, so the cases run in parallel.
    std::thread::scope(|scope| ways.iter().for_each(|way| drop(scope.spawn(|| changes_on_its_way(way)))));
}

fn changes_on_its_way(way: &Way) {
    let mut led = Led::new_on(way, 1 << 14, Terms { lease: Duration::from_secs(3), ..TERMS });
    // From here on, the standby has a base of the page for differences.
    led.write(0, 7, 0, &noise(9001));
    led.checkpoint();
    let held = [0, 1].map(|block| bytes_of(&led.here.ram, block));
    *led.arbiter.0.lock() = Some("standby");
    let changed = &noise(9002)[..1024];
    led.change(changed);
    led.write(0, 7, 512, changed);
    // Other pages, which arrive unchanged.
    led.write(0, 8, 0, &noise(9003));
    led.write(1, 4, 0, &[0; 4096]);

    led.primary.checkpoint_now();

    wait_for(&format!("a changed byte, {way:?}"), || led.has_changed());
    let ended = led.standby.contact().expect("a contact").wait(PATIENCE).expect("an end");
    assert_eq!(ended, standby::Outcome::Running(2), "{way:?}");
    let trouble = led.standby.contact().and_then(|contact| contact.state().trouble).unwrap_or_default();
    assert!(trouble.contains("checkpoint 3: its digest of the pages is"), "{way:?}: {trouble}");
    for (block, held) in held.iter().enumerate() {
        assert!(bytes_of(&led.there.ram, block) == *held, "{way:?}: block {block}");
    }
    assert_eq!(led.primary.wait(), primary::Outcome::Lost, "{way:?}");
}
