//! The recipe of a file: a decoded one encodes to bytes that decode alike.

use sterna_store::internals::recipe;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let blocks = [64 << 10, 4096, 100];
    if let Some(again) = recipe(data, &blocks) {
        assert_eq!(recipe(&again, &blocks), Some(again.clone()));
    }
}
