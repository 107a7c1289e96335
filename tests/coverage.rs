//! Which instruction sets this run of the tests was about. The other tests run on those the machine has, and pass
//! where it has few: a run that should have covered them all asks here.

use sdpa::{Isa, NoMatrixUnit};

#[test]
fn the_instruction_sets_of_this_machine() {
    for name in Isa::known() {
        let isa = Isa::from_name(name);
        println!("{name}: {}", if isa.is_some() { "covered" } else { "NOT covered, this machine lacks it" });
        assert!(isa.is_none_or(|isa| isa.name() == name && isa.to_string() == name && format!("{isa:?}") == name));
    }
    let native = if Isa::detect().has_native_bf16() { "covered" } else { "NOT covered, this machine lacks it" };
    println!("products of bfloat16: {native}");
    if let Err(why) = Isa::detect().matrix_unit() {
        println!("matrix unit: NOT covered, {why}");
    }
    #[cfg(target_arch = "x86_64")]
    for (name, here) in
        [("AVX-VNNI", is_x86_feature_detected!("avxvnni")), ("AVX-512 VNNI", is_x86_feature_detected!("avx512vnni"))]
    {
        println!("products of bytes, {name}: {}", if here { "covered" } else { "NOT covered, this machine lacks it" });
    }
    assert_eq!(Isa::available().next().map(Isa::name), Some("portable"));
    assert_eq!(Isa::available().last(), Some(Isa::detect()));
    assert_eq!(Isa::from_name("mmx"), None);
    assert_eq!(Isa::from_name(""), None);
}

#[test]
#[ignore = "for machines that should have AVX2: fails where the tests could not cover it"]
fn avx2_was_covered() {
    assert!(Isa::from_name("avx2").is_some_and(Isa::has_fma), "this machine lacks AVX2, FMA or F16C");
}

#[test]
#[ignore = "for machines that should have AVX-512: fails where the tests could not cover it"]
fn avx512_was_covered() {
    assert!(Isa::from_name("avx512").is_some_and(Isa::has_fma), "this machine lacks AVX-512F");
}

#[test]
#[ignore = "for machines that should have AMX: fails where it is not found; a container may forbid its use"]
fn amx_was_covered() {
    match Isa::detect().matrix_unit() {
        Ok(()) => assert!(Isa::from_name("amx").is_some_and(Isa::has_native_bf16)),
        Err(NoMatrixUnit::Refused) => println!("AMX: NOT covered, {}", NoMatrixUnit::Refused),
        Err(why) => panic!("{why}"),
    }
}

#[test]
#[ignore = "for machines of AArch64: fails where the tests could not cover NEON"]
fn neon_was_covered() {
    assert!(Isa::from_name("neon").is_some_and(Isa::has_fma), "this machine lacks NEON");
}

#[test]
#[ignore = "for machines that should have AVX512_BF16 of AMD or FEAT_BF16: fails where the tests could not cover it"]
fn bf16_was_covered() {
    assert!(Isa::detect().has_native_bf16(), "this machine has no fast bf16 dot product");
}
