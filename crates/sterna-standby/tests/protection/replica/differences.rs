//! Differences over multifd channels (specs/extension.md §10): how a standby applies them, and which ones it refuses.
//! Tests of differences on the main channel are in `mod`.

use super::protected::{Bench, World, wait_for};
use super::*;
use heart::{Heart, secret};

/// A page of a block, and its difference.
type Delta<'a> = (usize, usize, &'a [u8]);

/// Byte 16 becomes 7.
const SOUND: [u8; 3] = [16, 1, 7];
/// Byte 4095 and the byte after the page become 9.
const TOO_LONG: [u8; 5] = [0xff, 0x1f, 2, 9, 9];

#[test]
fn differences_on_channels_are_checked_each_and_the_last_checkpoint_stays() {
    let overlong = [0xf0; 4];
    let cases: [(&[Delta<'_>], &str); 3] = [
        (&[(0, 4, &SOUND), (0, 5, &TOO_LONG)], "page 0x5000 of block \"pc.ram\" in checkpoint 3"),
        (&[(0, 6, &overlong)], "page 0x6000 of block \"pc.ram\" in checkpoint 3"),
        // Each channel sends it once: the order of the two is unknown.
        (&[(0, 4, &SOUND), (0, 4, &SOUND)], "came twice between two flushes"),
    ];
    for (deltas, says) in cases {
        let bench = Bench::new(Arc::<World>::default(), 2, &options(), true);
        let to = bench.standby.address();
        let mut heart = Heart::greet_announcing_differences(&to, &secret()).expect("greeted");
        let mut primary = bench.seed(2);
        primary.checkpoint(&[(0, 3, 5)], 2);
        primary.begin_checkpoint();
        primary.send_deltas_on_lanes(&[(0, 3, &SOUND), (1, 2, &SOUND)]);
        primary.send_checkpoint(&[(0, 8, 1)], 3);
        primary.hear("00000005 00000006");
        assert_eq!(heart.beat(), 2);
        assert_eq!(bench.standby.statistics().last_normal_pages, 3);

        primary.begin_checkpoint();
        primary.send_deltas_on_lanes(deltas);
        primary.send_checkpoint(&[], 4);

        wait_for("the end", || !bench.trouble().is_empty());
        assert!(bench.trouble().contains(says), "{}", bench.trouble());
        assert_eq!(bench.standby.statistics().checkpoints, 2);
    }
}

#[test]
fn differences_on_channels_that_were_not_announced_are_refused() {
    let (standby, mut primary) = pair(2);
    primary.checkpoint(&[(0, 3, 5)], 2);
    let ram = primary.ram.clone();
    primary.begin_checkpoint();
    primary.send_deltas_on_lanes(&[(0, 3, &SOUND)]);
    primary.send_checkpoint(&[], 3);

    let why = lost(&standby);

    let MigrationError::Wire { error, .. } = &why else { panic!("{why}") };
    assert_eq!((error.message, error.paragraph), ("multifd packet", "specs/extension.md §10"), "{why}");
    assert_takes_over(&standby, 1, &ram, 2);
}
