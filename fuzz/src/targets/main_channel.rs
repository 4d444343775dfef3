//! The main channel: first byte expectations, second the size of pieces, then the stream.

use super::stream;

/// Takes one input.
pub fn target(data: &[u8]) {
    let [choice, piece, stream @ ..] = data else { return };
    let whole = stream::run(*choice, stream, stream.len().max(1));
    let pieces = stream::run(*choice, stream, usize::from(*piece).max(1));
    assert_eq!(whole, pieces, "how the bytes arrive must not matter");
}
