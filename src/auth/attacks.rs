//! Published attacks on signatures (Wycheproof), and keys used with the wrong algorithm.
//!
//! The vectors contain keys as PEM texts, which are read like an operator's key files. Vectors
//! marked acceptable may pass or fail; valid ones must pass and invalid ones must fail.

use wycheproof::{TestResult, ecdsa, eddsa, rsa_pkcs1_verify, rsa_pss_verify};

use super::keys::{Algorithm, PublicKey};
use super::tests::{ED25519, P256, P384, RSA_SIGNER, Signer};

/// The number of vectors of each kind. A test without any would prove nothing.
#[derive(Default)]
struct Seen {
    valid: usize,
    invalid: usize,
}

impl Seen {
    fn check(&mut self, what: &str, result: TestResult, passed: bool) {
        match result {
            TestResult::Valid => {
                self.valid += 1;
                assert!(passed, "{what}: a good signature was refused");
            }
            TestResult::Invalid => {
                self.invalid += 1;
                assert!(!passed, "{what}: a forgery was let in");
            }
            TestResult::Acceptable => {}
        }
    }

    fn assert_enough(&self) {
        assert!(
            self.valid > 5 && self.invalid > 5,
            "{} valid and {} invalid vectors were seen",
            self.valid,
            self.invalid
        );
    }
}

fn passes(pem: &str, algorithm: Algorithm, message: &[u8], signature: &[u8]) -> bool {
    PublicKey::from_pem(pem).is_ok_and(|key| key.verify(algorithm, message, signature))
}

/// Runs the vectors of one collection. Their types have the same members but no common trait.
macro_rules! check_all {
    ($name:expr, $set:expr, $algorithm:expr) => {{
        let mut seen = Seen::default();
        for group in $set.test_groups {
            for test in group.tests {
                let passed = passes(&group.pem, $algorithm, &test.msg, &test.sig);
                seen.check(&format!("{:?} {}", $name, test.tc_id), test.result, passed);
            }
        }
        seen.assert_enough();
    }};
}

#[test]
fn no_forgery_of_the_older_rsa_signatures_is_let_in() {
    use rsa_pkcs1_verify::TestName::*;
    for (name, algorithm) in [
        (Rsa2048Sha256, Algorithm::Rs256),
        (Rsa3072Sha256, Algorithm::Rs256),
        (Rsa4096Sha256, Algorithm::Rs256),
        (Rsa8192Sha256, Algorithm::Rs256),
        (Rsa2048Sha384, Algorithm::Rs384),
        (Rsa4096Sha384, Algorithm::Rs384),
        (Rsa2048Sha512, Algorithm::Rs512),
        (Rsa4096Sha512, Algorithm::Rs512),
    ] {
        check_all!(
            name,
            rsa_pkcs1_verify::TestSet::load(name).unwrap(),
            algorithm
        );
    }
}

#[test]
fn no_forgery_of_the_newer_rsa_signatures_is_let_in() {
    use rsa_pss_verify::TestName::*;
    for (name, algorithm) in [
        (RsaPss2048Sha256Mgf1SaltLen32, Algorithm::Ps256),
        (RsaPss3072Sha256Mgf1SaltLen32, Algorithm::Ps256),
        (RsaPss4096Sha256Mgf1SaltLen32, Algorithm::Ps256),
        (RsaPss2048Sha384Mgf1SaltLen48, Algorithm::Ps384),
        (RsaPss4096Sha384Mgf1SaltLen48, Algorithm::Ps384),
        (RsaPss4096Sha512Mgf1SaltLen64, Algorithm::Ps512),
    ] {
        check_all!(
            name,
            rsa_pss_verify::TestSet::load(name).unwrap(),
            algorithm
        );
    }
}

#[test]
fn a_salt_of_another_length_is_refused() {
    use rsa_pss_verify::TestName::{RsaPss2048Sha256Mgf1SaltLen0, RsaPss4096Sha512Mgf1SaltLen32};
    // RFC 7518 requires a salt as long as the hash. Other lengths are valid signatures elsewhere,
    // but not here.
    let mut seen = 0;
    for (name, algorithm) in [
        (RsaPss2048Sha256Mgf1SaltLen0, Algorithm::Ps256),
        (RsaPss4096Sha512Mgf1SaltLen32, Algorithm::Ps512),
    ] {
        for group in rsa_pss_verify::TestSet::load(name).unwrap().test_groups {
            assert!(PublicKey::from_pem(&group.pem).is_ok()); // control
            for test in group
                .tests
                .iter()
                .filter(|test| test.result == TestResult::Valid)
            {
                seen += 1;
                assert!(
                    !passes(&group.pem, algorithm, &test.msg, &test.sig),
                    "{name:?} {}",
                    test.tc_id
                );
            }
        }
    }
    assert!(seen > 5);
}

#[test]
fn no_forgery_on_an_elliptic_curve_is_let_in() {
    use ecdsa::TestName::*;
    for (name, algorithm) in [
        (EcdsaSecp256r1Sha256P1363, Algorithm::Es256),
        (EcdsaSecp384r1Sha384P1363, Algorithm::Es384),
    ] {
        check_all!(name, ecdsa::TestSet::load(name).unwrap(), algorithm);
    }
    let name = eddsa::TestName::Ed25519;
    check_all!(name, eddsa::TestSet::load(name).unwrap(), Algorithm::EdDsa);
}

#[test]
fn a_signature_in_the_other_form_is_refused() {
    // Tokens contain both numbers side by side (RFC 7518 §3.4). The DER form of certificates would
    // be a second encoding of the same signature.
    let name = ecdsa::TestName::EcdsaSecp256r1Sha256;
    let mut seen = 0;
    for group in ecdsa::TestSet::load(name).unwrap().test_groups {
        for test in group
            .tests
            .iter()
            .filter(|test| test.result == TestResult::Valid)
        {
            seen += 1;
            assert!(
                !passes(&group.pem, Algorithm::Es256, &test.msg, &test.sig),
                "{}",
                test.tc_id
            );
        }
    }
    assert!(seen > 5);
}

#[test]
fn an_algorithm_works_with_its_own_kind_of_key_and_with_no_other() {
    let message = b"message";
    let own: [(&Signer, &[Algorithm]); 4] = [
        (&RSA_SIGNER, &Algorithm::ALL[..6]),
        (&P256, &[Algorithm::Es256]),
        (&P384, &[Algorithm::Es384]),
        (&ED25519, &[Algorithm::EdDsa]),
    ];
    for (signer, own) in own {
        for signed_as in own {
            let signature = signer.sign(*signed_as, message);
            for checked_as in Algorithm::ALL {
                let passed = signer.public.verify(checked_as, message, &signature);
                assert_eq!(
                    passed,
                    checked_as == *signed_as,
                    "signed as {signed_as:?}, checked as {checked_as:?}"
                );
                assert_eq!(signer.public.fits(checked_as), own.contains(&checked_as));
            }
        }
    }
}

#[test]
fn a_changed_bit_spoils_every_signature() {
    for (signer, algorithm) in [
        (&*RSA_SIGNER, Algorithm::Rs256),
        (&*RSA_SIGNER, Algorithm::Ps384),
        (&*P256, Algorithm::Es256),
        (&*P384, Algorithm::Es384),
        (&*ED25519, Algorithm::EdDsa),
    ] {
        let signature = signer.sign(algorithm, b"message");
        assert!(signer.public.verify(algorithm, b"message", &signature)); // control
        assert!(!signer.public.verify(algorithm, b"massage", &signature));
        for place in 0..signature.len() {
            let mut changed = signature.clone();
            changed[place] ^= 1;
            assert!(
                !signer.public.verify(algorithm, b"message", &changed),
                "{algorithm:?} {place}"
            );
        }
        assert!(!signer.public.verify(algorithm, b"message", &[]));
        assert!(
            !signer
                .public
                .verify(algorithm, b"message", &[signature, vec![0]].concat())
        );
    }
}
