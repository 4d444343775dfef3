//! XBZRLE deltas. The input is applied to a page; the resulting difference, encoded again, must
//! give the same page.

use sterna_wire::{PAGE_SIZE, xbzrle};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(delta: &[u8]) {
    let old = [0x5a; PAGE_SIZE];
    let mut new = old;
    let applied = xbzrle::apply(delta, &mut new);
    assert_eq!(applied.is_ok(), xbzrle::check(delta).is_ok());
    if applied.is_err() {
        assert_eq!(old, new);
        return;
    }
    let mut again = Vec::new();
    if xbzrle::encode(&old, &new, PAGE_SIZE, &mut again) {
        let mut third = old;
        xbzrle::apply(&again, &mut third).unwrap();
        assert_eq!(new, third);
    }
}
