//! The main channel. The first byte chooses the expectations, the second the size of pieces;
//! the stream follows.

use super::stream;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let [choice, piece, stream @ ..] = data else { return };
    let whole = stream::run(*choice, stream, stream.len().max(1));
    let pieces = stream::run(*choice, stream, usize::from(*piece).max(1));
    assert_eq!(whole, pieces, "how the bytes arrive must not matter");
}
