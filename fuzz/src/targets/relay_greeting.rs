//! The greeting between two relays: hello, answer, confirmation.

use sterna_relay::frame::{
    Answer, Confirm, Hello, Offer, Purpose, SessionId, SessionKey, SharedSecret, Status,
};

/// Decodes one input as each message; none of them proves anything without the key.
pub fn target(data: &[u8]) {
    let secret = SharedSecret::from_file(&[7; 32]);
    let key = SessionKey::new(secret.as_ref(), SessionId([1; 16]), &[2; 32]);
    let hello = match Hello::decode(data) {
        Ok(Some((hello, used))) => {
            let mut again = Vec::new();
            hello.encode(&mut again);
            assert_eq!(again, data[..used]);
            assert!(used <= Hello::MAX_BYTES);
            assert!(!hello.is_authentic(&key, &None), "no input knows the secret");
            hello
        }
        Ok(None) => return assert!(data.len() < Hello::MAX_BYTES),
        Err(error) => return assert_eq!(Hello::decode(data), Err(error)),
    };
    let answer =
        Answer::new(Status::Welcome, Offer { packs: true, cache_pages: 9 }, [3; 16], &hello, &key, &None);
    for chunk in data.windows(Answer::BYTES).take(4) {
        let Some(chunk) = chunk.first_chunk() else { return };
        if let Ok(answer) = Answer::decode(chunk) {
            assert!(!answer.is_authentic(&hello, &key, &None), "no input knows the secret");
        }
    }
    for chunk in data.windows(Confirm::BYTES).take(4) {
        let Some(chunk) = chunk.first_chunk() else { return };
        assert!(!Confirm::from_bytes(*chunk).is_authentic(&hello, &answer, &key, &None));
    }
    let mut own = Vec::new();
    answer.encode(&mut own);
    let own = Answer::decode(own.first_chunk().expect("a whole answer")).expect("its own answer");
    assert!(own.is_authentic(&hello, &key, &None));
}

/// First inputs, with their names: a hello of each version, with an answer and a confirmation.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let key = SessionKey::new(None, SessionId([1; 16]), &[2; 32]);
    let offer = Offer { packs: true, cache_pages: 0 };
    let mut seeds = Vec::new();
    for (name, offer) in [("first", None), ("second", Some(offer))] {
        for purpose in [Purpose::Open, Purpose::Join] {
            let share = if purpose == Purpose::Open { [2; 32] } else { [0; 32] };
            let route = "web1".parse().expect("a name");
            let id = SessionId([1; 16]);
            let hello = Hello::new(id, purpose, (1, 2), 3, [4; 16], share, route, offer, &key, &None);
            let accepts = Offer { packs: true, cache_pages: 9 };
            let answer = Answer::new(Status::Welcome, accepts, [3; 16], &hello, &key, &None);
            let mut bytes = Vec::new();
            hello.encode(&mut bytes);
            answer.encode(&mut bytes);
            bytes.extend(Confirm::new(&hello, &answer, &key, &None).to_bytes());
            seeds.push((format!("{name}-{purpose:?}").to_ascii_lowercase(), bytes));
        }
    }
    seeds
}
