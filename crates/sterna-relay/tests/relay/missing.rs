//! Sessions whose receiver lacks a page, and sessions that lose an acknowledgement.

use std::time::Duration;

use sterna_relay::frame::{Frame, Rule, SessionId};
use sterna_relay::session::{CarrierId, OutgoingFrame, Piece, Planted, Role, Session, Settings};

const BUFFER: u64 = Settings::LEAST_BUFFER;

/// Two sessions that have opened flow 1 over carriers 0 and 1.
fn pair(planted: Option<Planted>) -> ([Session; 2], [[CarrierId; 2]; 2]) {
    let mut sessions = [Role::Dialer, Role::Acceptor].map(|role| {
        let mut settings = Settings::new(BUFFER);
        settings.planted = planted;
        let mut session = Session::new(SessionId([1; 16]), role, settings);
        session.agree();
        session
    });
    let carriers =
        [0, 1].map(|lane| [0, 1].map(|side: usize| sessions[side].carrier_up(lane, Duration::ZERO)));
    sessions[0].open(Duration::ZERO);
    exchange(&mut sessions, &carriers);
    (sessions, carriers)
}

/// Carries all frames of these carriers, until there are none.
fn exchange(sessions: &mut [Session; 2], carriers: &[[CarrierId; 2]]) {
    loop {
        let mut count = 0;
        for ends in carriers {
            for side in 0..2 {
                while let Some(frame) = sessions[side].next_frame(ends[side], Duration::ZERO) {
                    count += 1;
                    let OutgoingFrame { frame, payload, .. } = frame;
                    sessions[1 - side].receive(ends[1 - side], frame, payload, Duration::ZERO).unwrap();
                }
            }
        }
        if count == 0 {
            return;
        }
    }
}

/// The other relay lacks a page, and the carrier with its MISS is lost. Returns whether the bytes arrive nevertheless.
fn miss_is_lost(planted: Option<Planted>) -> bool {
    let (mut sessions, carriers) = pair(planted);
    let now = Duration::ZERO;
    sessions[0].take(1, vec![1; 5000].into(), now);
    let frame = sessions[0].next_frame(carriers[1][0], now).expect("bulk data use carrier 1").frame;
    let Frame::Data { offset, length, .. } = frame else { panic!("{frame:?}") };
    sessions[1].missing(carriers[1][1], 1, offset, length, now).unwrap();
    let lost = sessions[1].next_frame(carriers[0][1], now).expect("MISS").frame;
    assert_eq!(lost, Frame::Miss { flow: 1, offset: 0 });
    [0, 1].into_iter().for_each(|side| sessions[side].carrier_down(carriers[0][side], now));
    exchange(&mut sessions, &carriers[1..]);
    sessions[1].held_bytes().1 == 5000
}

#[test]
fn session_asks_again_for_missing_bytes_if_its_question_is_lost() {
    assert!(miss_is_lost(None));
    assert!(!miss_is_lost(Some(Planted::ForgetsMiss)), "the test notices the planted bug");
}

#[test]
fn session_repeats_the_last_acknowledgement_of_a_flow_that_it_has_forgotten() {
    let (mut sessions, carriers) = pair(None);
    let now = Duration::ZERO;
    sessions[1].finish(1);
    exchange(&mut sessions, &carriers);
    sessions[0].end_delivered(1);
    sessions[0].finish(1);
    let [dialer, acceptor] = &mut sessions;
    // The acceptor acknowledges the end of the dialer and forgets the flow. The acknowledgement is lost.
    let finish = dialer.next_frame(carriers[1][0], now).expect("FINISH").frame;
    acceptor.receive(carriers[1][1], finish, None, now).unwrap();
    acceptor.end_delivered(1);
    while acceptor.next_frame(carriers[0][1], now).is_some() {}
    assert_eq!((dialer.open_flows(), acceptor.open_flows()), (1, 0));
    acceptor.carrier_down(carriers[0][1], now);
    dialer.carrier_down(carriers[0][0], now);
    exchange(&mut sessions, &carriers[1..]);
    assert_eq!(sessions[0].open_flows(), 0, "the dialer's flow is over");
}

#[test]
fn session_refuses_frames_of_compression_that_break_its_rules() {
    let now = Duration::ZERO;
    let start = |role, agrees| {
        let mut session = Session::new(SessionId([1; 16]), role, Settings::new(BUFFER));
        if agrees {
            session.agree();
        }
        let carrier = session.carrier_up(0, now);
        session.receive(carrier, Frame::Sync, None, now).unwrap();
        (session, carrier)
    };
    let have = Frame::Have { stay: true, hashes: vec![1] };
    for (role, agrees, frame) in [
        (Role::Acceptor, true, Frame::Miss { flow: 1, offset: 0 }),
        (Role::Acceptor, true, have.clone()),
        (Role::Dialer, false, Frame::Miss { flow: 1, offset: 0 }),
        (Role::Dialer, false, have),
    ] {
        let (mut session, carrier) = start(role, agrees);
        let error = session.receive(carrier, frame.clone(), None, now).unwrap_err();
        assert!(matches!(error.source.rule, Rule::NotAgreed), "{frame:?}: {error}");
    }

    let (mut session, carrier) = start(Role::Dialer, true);
    session.open(now);
    while session.next_frame(carrier, now).is_some() {}
    let error = session.receive(carrier, Frame::Miss { flow: 1, offset: 1 }, None, now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::NeverSentMiss { offset: 1, sent: 0 }), "{error}");

    let (mut session, carrier) = start(Role::Acceptor, true);
    session.receive(carrier, Frame::Open { flow: 1, credit: 100 }, None, now).unwrap();
    let error = session.missing(carrier, 2, 0, 10, now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::UnknownFlow), "{error}");
    let error = session.missing(carrier, 1, 0, 1 << 20, now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::BeyondCredit { .. }), "{error}");
    session.missing(carrier, 1, 0, 10, now).unwrap();
    // What follows is ignored until the bytes come again, which may have no reference.
    let later = Frame::Data { flow: 1, offset: 10, length: 1 };
    session.receive(carrier, later.clone(), Some(Piece::from(vec![0])), now).unwrap();
    session.receive(carrier, Frame::Finish { flow: 1, offset: 11 }, None, now).unwrap();
    let asked = std::iter::from_fn(|| session.next_frame(carrier, now)).map(|frame| frame.frame);
    assert!(asked.into_iter().any(|frame| frame == Frame::Miss { flow: 1, offset: 0 }));
    let error =
        session.missing(carrier, 1, 5, 10, now).map(drop).and(session.missing(carrier, 1, 0, 10, now));
    assert!(matches!(error.unwrap_err().source.rule, Rule::ReferenceAgain));
    let again = Frame::Data { flow: 1, offset: 0, length: 10 };
    session.receive(carrier, again, Some(Piece::from(vec![0; 10])), now).unwrap();
    let gap = Frame::Data { flow: 1, offset: 12, length: 1 };
    let error = session.receive(carrier, gap, Some(Piece::from(vec![0])), now).unwrap_err();
    assert!(matches!(error.source.rule, Rule::Gap { begins: 12, received: 10 }), "{error}");
    session.receive(carrier, later, Some(Piece::from(vec![0])), now).unwrap();
}
