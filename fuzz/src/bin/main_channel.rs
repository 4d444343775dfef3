//! The main channel: first byte expectations, second the size of pieces, then the stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let [choice, piece, stream @ ..] = data else { return };
    let whole = sterna_fuzz::run(*choice, stream, stream.len().max(1));
    let pieces = sterna_fuzz::run(*choice, stream, usize::from(*piece).max(1));
    assert_eq!(whole, pieces, "how the bytes arrive must not matter");
});
